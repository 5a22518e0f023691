-- What scripts that are handed many block keys begin with: how those are taken apart.

local KEY_BYTES = 16
local MAX_UNPACKED = 2048  -- unpack puts its values on Lua's stack, which takes under 8,000

-- Up to `num_keys` keys of a blob of keys end to end, from one of its bytes on.
local function keys_from(blob, start, num_keys)
  local keys = {}
  for at = start, math.min(start + num_keys * KEY_BYTES, #blob + 1) - 1, KEY_BYTES do
    keys[#keys + 1] = string.sub(blob, at, at + KEY_BYTES - 1)
  end
  return keys
end

-- The answers of a command on a set to all keys of a blob, of which it is given as many at once as it takes.
local function each_chunk(command, set, blob)
  local answers = {}
  for start = 1, #blob, MAX_UNPACKED * KEY_BYTES do
    answers[#answers + 1] = redis.call(command, set, unpack(keys_from(blob, start, MAX_UNPACKED)))
  end
  return answers
end
