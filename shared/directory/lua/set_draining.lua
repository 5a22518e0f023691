-- Mark a worker as one that takes no new requests, or take the mark away.
--
-- KEYS[1] meta  hash
-- ARGV[1] epoch
-- ARGV[2] 1 or 0
-- Returns OK, STALE or UNKNOWN.

local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch then
  return 'UNKNOWN'
end
if epoch ~= ARGV[1] then
  return 'STALE'
end
redis.call('HSET', KEYS[1], 'draining', ARGV[2])
return 'OK'
