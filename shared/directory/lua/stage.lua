-- Add a chunk to the worker's snapshot in the making, which nobody sees before it is committed.
--
-- KEYS[1] meta    hash
-- KEYS[2] staged  set
-- ARGV[1] epoch
-- ARGV[2] epoch of the snapshot
-- ARGV[3] keys, 16 bytes each, end to end
-- Returns OK, STALE or UNKNOWN.

if refusal then
  return refusal
end
if staged_epoch ~= ARGV[2] then
  redis.call('UNLINK', KEYS[2])
  redis.call('HSET', KEYS[1], 'staged', ARGV[2])
end
each_chunk('SADD', KEYS[2], ARGV[3])
redis.call('PEXPIREAT', KEYS[2], expires_at_ms)
return 'OK'
