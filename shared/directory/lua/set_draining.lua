-- Mark a worker as one that takes no new requests, or take the mark away.
--
-- KEYS[1] meta  hash
-- ARGV[1] epoch
-- ARGV[2] 1 or 0
-- Returns OK, STALE or UNKNOWN.

if refusal then
  return refusal
end
redis.call('HSET', KEYS[1], 'draining', ARGV[2])
return 'OK'
