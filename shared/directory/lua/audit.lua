-- How many blocks a worker's set holds, and how many of some keys it lacks, at one batch. Reads only.
--
-- KEYS[1] meta    hash
-- KEYS[2] blocks  set
-- ARGV[1] epoch
-- ARGV[2] sequence number
-- ARGV[3] keys, 16 bytes each, end to end
-- Returns {number of blocks, number of keys that are absent}, or nil where another batch was the last one.

local KEY_BYTES = 16
local CHUNK = 2048  -- unpack puts its values on Lua's stack, which takes under 8,000

local meta = redis.call('HMGET', KEYS[1], 'epoch', 'seq')
if meta[1] ~= ARGV[1] or meta[2] ~= ARGV[2] then
  return nil
end
local blob = ARGV[3]
local num_absent = 0
for start = 1, #blob, CHUNK * KEY_BYTES do
  local keys = {}
  for at = start, math.min(start + CHUNK * KEY_BYTES, #blob + 1) - 1, KEY_BYTES do
    keys[#keys + 1] = string.sub(blob, at, at + KEY_BYTES - 1)
  end
  for _, is_held in ipairs(redis.call('SMISMEMBER', KEYS[2], unpack(keys))) do
    num_absent = num_absent + 1 - is_held
  end
end
return {redis.call('SCARD', KEYS[2]), num_absent}
