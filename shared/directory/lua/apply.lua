-- Apply one batch to a worker's resident set and tell mirrors of it, if it is the next one of the current epoch.
--
-- KEYS[1] meta    hash
-- KEYS[2] blocks  set
-- KEYS[3] events  stream
-- ARGV[1] epoch
-- ARGV[2] sequence number
-- ARGV[3] holder as rank:tier:group
-- ARGV[4] stored keys, 16 bytes each, end to end
-- ARGV[5] removed keys, likewise
-- ARGV[6] entries that the event stream keeps, about
-- Returns OK, also for a repeat, which changes nothing; GAP; STALE; UNKNOWN.

if refusal then
  return refusal
end
local seq = tonumber(ARGV[2])
if seq <= last_seq then
  return 'OK'
end
if seq ~= last_seq + 1 then
  return 'GAP'
end
each_chunk('SADD', KEYS[2], ARGV[4])
each_chunk('SREM', KEYS[2], ARGV[5])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[6], '*',
  'epoch', ARGV[1], 'seq', ARGV[2], 'holder', ARGV[3], 'stored', ARGV[4], 'removed', ARGV[5])
-- Last: an error above undoes nothing, and the batch that it cut short must not pass for applied when it is repeated.
redis.call('HSET', KEYS[1], 'seq', ARGV[2])
-- A set that was emptied, and a stream that the store threw away, start anew without an expiry of their own.
redis.call('PEXPIREAT', KEYS[2], expires_at_ms)
redis.call('PEXPIREAT', KEYS[3], expires_at_ms)
return 'OK'
