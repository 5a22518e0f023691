-- Make the staged snapshot the worker's resident set, at once and under its own epoch.
--
-- KEYS[1] meta    hash
-- KEYS[2] blocks  set
-- KEYS[3] events  stream
-- KEYS[4] staged  set
-- ARGV[1] epoch
-- ARGV[2] epoch of the snapshot
-- ARGV[3] number of keys that the publisher staged
-- ARGV[4] entries that the event stream keeps, about
-- Returns OK, also for a repeat; GAP when the store holds another number of keys, which it then drops; STALE; UNKNOWN.

if refusal == 'STALE' and current_epoch == ARGV[2] then
  return 'OK'
end
if refusal then
  return refusal
end
if staged_epoch ~= ARGV[2] then
  redis.call('UNLINK', KEYS[4])
end
local num_keys = redis.call('SCARD', KEYS[4])
if num_keys ~= tonumber(ARGV[3]) then
  redis.call('HDEL', KEYS[1], 'staged')
  redis.call('UNLINK', KEYS[4])
  return 'GAP'
end
-- What can fail comes first, since an error undoes nothing and a repeat must find what it needs.
-- Sequence 0 tells mirrors of a new epoch: what they hold of this worker is void.
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[4], '*',
  'epoch', ARGV[2], 'seq', 0, 'holder', '', 'stored', '', 'removed', '')
-- RENAME over a large set would free it on the spot and hold up everybody.
redis.call('UNLINK', KEYS[2])
if num_keys > 0 then
  redis.call('RENAME', KEYS[4], KEYS[2])
end
redis.call('HDEL', KEYS[1], 'staged')
redis.call('HSET', KEYS[1], 'epoch', ARGV[2], 'seq', 0)
redis.call('PEXPIREAT', KEYS[2], expires_at_ms)
redis.call('PEXPIREAT', KEYS[3], expires_at_ms)
return 'OK'
