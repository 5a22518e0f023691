-- How many leading keys of a chain one worker holds. Reads only; lease and blocks are read at one moment.
--
-- KEYS[1] meta    hash
-- KEYS[2] blocks  set
-- ARGV[1] chain of keys, 16 bytes each, end to end
-- Returns {instance, number of leading keys}, or nil for a worker without a lease.

local instance = redis.call('HGET', KEYS[1], 'instance')
if not instance or redis.call('PEXPIRETIME', KEYS[1]) < 0 then
  return nil  -- a lease without an end is none of ours
end
local chain = ARGV[1]
local num_matched = 0
-- Most workers hold little of a chain: look at few keys first, then at more and more of them.
local chunk = 16
local at = 1
while at <= #chain do
  local keys = keys_from(chain, at, chunk)
  local held = redis.call('SMISMEMBER', KEYS[2], unpack(keys))
  for _, is_held in ipairs(held) do
    if is_held == 0 then
      return {instance, num_matched}
    end
    num_matched = num_matched + 1
  end
  at = at + #keys * KEY_BYTES
  chunk = math.min(chunk * 4, MAX_UNPACKED)
end
return {instance, num_matched}
