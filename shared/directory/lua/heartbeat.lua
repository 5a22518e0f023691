-- Extend a worker's lease, and with it the life of everything that the worker owns; drop events that mirrors have read.
--
-- KEYS[1] meta    hash
-- KEYS[2] blocks  set
-- KEYS[3] events  stream
-- KEYS[4] staged  set
-- ARGV[1] epoch
-- ARGV[2] sequence number of the last batch that the publisher knows to be applied
-- ARGV[3] lease in milliseconds
-- Returns OK; GAP when another batch was the last one (the lease is extended all the same); STALE; UNKNOWN.

local KEEP_EVENTS_MS = 10000  -- a mirror that is later than this loads the worker again

if refusal then
  return refusal
end
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
for _, key in ipairs(KEYS) do
  redis.call('PEXPIREAT', key, now_ms + ARGV[3])
end
-- Else a worker at rest would keep the events of its last busy time. A value of a wrong type is for others to find.
redis.pcall('XTRIM', KEYS[3], 'MINID', now_ms - KEEP_EVENTS_MS)
if last_seq ~= tonumber(ARGV[2]) then
  return 'GAP'
end
return 'OK'
