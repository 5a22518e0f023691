-- Take a worker's id with an empty resident set, unless another life of the worker has a live lease.
--
-- KEYS[1] meta    hash
-- KEYS[2] blocks  set
-- KEYS[3] events  stream
-- KEYS[4] staged  set
-- ARGV[1] instance
-- ARGV[2] epoch
-- ARGV[3] WorkerInfo, as messages.encode_record gives it
-- ARGV[4] lease in milliseconds
-- ARGV[5] entries that the event stream keeps, about
-- Returns OK or TAKEN.

if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then
  redis.call('UNLINK', KEYS[1])
end
local holder = redis.call('HGET', KEYS[1], 'instance')
-- A lease without an end is none of ours: it would hold the id for ever.
if holder and holder ~= ARGV[1] and redis.call('PEXPIRETIME', KEYS[1]) > 0 then
  return 'TAKEN'
end
redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[4])
if redis.call('TYPE', KEYS[3]).ok ~= 'stream' then
  redis.call('UNLINK', KEYS[3])
end
-- Sequence 0 tells mirrors of a new epoch: what they hold of this worker is void.
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[5], '*',
  'epoch', ARGV[2], 'seq', 0, 'holder', '', 'stored', '', 'removed', '')
redis.call('HSET', KEYS[1], 'instance', ARGV[1], 'epoch', ARGV[2], 'seq', 0, 'info', ARGV[3], 'draining', 0)
local now = redis.call('TIME')
local expires_at_ms = now[1] * 1000 + math.floor(now[2] / 1000) + ARGV[4]
redis.call('PEXPIREAT', KEYS[1], expires_at_ms)
redis.call('PEXPIREAT', KEYS[3], expires_at_ms)
return 'OK'
