-- How many blocks a worker's set holds, and how many of some keys it lacks, at one batch. Reads only.
--
-- KEYS[1] meta    hash
-- KEYS[2] blocks  set
-- ARGV[1] epoch
-- ARGV[2] sequence number
-- ARGV[3] keys, 16 bytes each, end to end
-- Returns {number of blocks, number of keys that are absent}, or nil where another batch was the last one.

local meta = redis.call('HMGET', KEYS[1], 'epoch', 'seq')
if meta[1] ~= ARGV[1] or meta[2] ~= ARGV[2] then
  return nil
end
local num_absent = 0
for _, held in ipairs(each_chunk('SMISMEMBER', KEYS[2], ARGV[3])) do
  for _, is_held in ipairs(held) do
    num_absent = num_absent + 1 - is_held
  end
end
return {redis.call('SCARD', KEYS[2]), num_absent}
