-- Add a chunk to the worker's snapshot in the making, which nobody sees before it is committed.
--
-- KEYS[1] meta    hash
-- KEYS[2] staged  set
-- ARGV[1] epoch
-- ARGV[2] epoch of the snapshot
-- ARGV[3] keys, 16 bytes each, end to end
-- Returns OK, STALE or UNKNOWN.

local KEY_BYTES = 16
local CHUNK = 2048  -- unpack puts its values on Lua's stack, which takes under 8,000

if refusal then
  return refusal
end
if staged_epoch ~= ARGV[2] then
  redis.call('UNLINK', KEYS[2])
  redis.call('HSET', KEYS[1], 'staged', ARGV[2])
end
local blob = ARGV[3]
for start = 1, #blob, CHUNK * KEY_BYTES do
  local members = {}
  for at = start, math.min(start + CHUNK * KEY_BYTES, #blob + 1) - 1, KEY_BYTES do
    members[#members + 1] = string.sub(blob, at, at + KEY_BYTES - 1)
  end
  redis.call('SADD', KEYS[2], unpack(members))
end
redis.call('PEXPIREAT', KEYS[2], expires_at_ms)
return 'OK'
