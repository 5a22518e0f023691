-- Want a pin, in place of what has its name; makes the board where there is none.
--
-- ARGV[1] name
-- ARGV[2] revision, which is the board's id where there was none
-- ARGV[3] time to live in milliseconds; empty: none
-- ARGV[4] PinSpec
-- ARGV[5] milliseconds that a pin outlives the last worker that kept it
-- ARGV[6] revision that must still stand; empty: any or none
-- ARGV[7] most pins
-- ARGV[8] most revisions remembered as given up
-- Returns OK, STALE (another revision stands, or none) or FULL.

local former = redis.call('HGET', INDEX, ARGV[1])
if ARGV[6] ~= '' and (not former or string.match(former, '^[^:]*') ~= ARGV[6]) then
  return 'STALE'
end
if not former and redis.call('HLEN', INDEX) >= tonumber(ARGV[7]) then
  return 'FULL'
end
redis.call('SET', BOARD, ARGV[2], 'NX')
if former then
  give_up(ARGV[1], tonumber(ARGV[8]))
end
enter(ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]))
return 'OK'
