-- Tell what is wanted, without tokens; for a worker, keep it alive too.
--
-- ARGV[1] id for a board that is not there; empty: a reader that neither makes nor keeps one
-- ARGV[2] milliseconds that a pin outlives the last worker that kept it
-- ARGV[3...] names that the worker keeps
-- Returns the board's id, the time in milliseconds, and the index as a flat list; nothing where there is no board.

if ARGV[1] ~= '' then
  redis.call('SET', BOARD, ARGV[1], 'NX')
  local kept = {}
  for at = 3, #ARGV do
    kept[#kept + 1] = integer(now + tonumber(ARGV[2]))
    kept[#kept + 1] = ARGV[at]
  end
  if #kept > 0 then
    redis.call('ZADD', KEPT, 'XX', unpack(kept))
  end
  extend(tonumber(ARGV[2]))
end
local board = redis.call('GET', BOARD)
if not board then
  return {}
end
return {board, integer(now), redis.call('HGETALL', INDEX)}
