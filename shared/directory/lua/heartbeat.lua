-- Extend a worker's lease, and with it the life of everything that the worker owns.
--
-- KEYS[1] meta    hash
-- KEYS[2] blocks  set
-- KEYS[3] events  stream
-- KEYS[4] staged  set
-- ARGV[1] epoch
-- ARGV[2] sequence number of the last batch that the publisher knows to be applied
-- ARGV[3] lease in milliseconds
-- Returns OK; GAP when another batch was the last one (the lease is extended all the same); STALE; UNKNOWN.

local meta = redis.call('HMGET', KEYS[1], 'epoch', 'seq')
if not meta[1] then
  return 'UNKNOWN'
end
if meta[1] ~= ARGV[1] then
  return 'STALE'
end
local now = redis.call('TIME')
local expires_at_ms = now[1] * 1000 + math.floor(now[2] / 1000) + ARGV[3]
for _, key in ipairs(KEYS) do
  redis.call('PEXPIREAT', key, expires_at_ms)
end
if tonumber(meta[2]) ~= tonumber(ARGV[2]) then
  return 'GAP'
end
return 'OK'
