-- What all scripts of the pin board begin with: the keys' names, the store's time, and the end of what is over.
--
-- KEYS[1] board    string  the board's id
-- KEYS[2] index    hash    name -> revision:time of expiry in milliseconds, which is empty for a pin that stays
-- KEYS[3] specs    hash    name -> PinSpec, as messages.encode_record gives it
-- KEYS[4] kept     zset    name by the time until which a worker keeps it, in milliseconds
-- KEYS[5] removed  zset    revision by the time at which it was given up, in milliseconds

local BOARD, INDEX, SPECS, KEPT, REMOVED = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function integer(number)
  return string.format('%.0f', number)
end

local function drop(name)
  redis.call('HDEL', INDEX, name)
  redis.call('HDEL', SPECS, name)
  redis.call('ZREM', KEPT, name)
end

-- A pin that was given up stays so on this board, whoever still knows it.
local function give_up(name, max_removed)
  local revision = string.match(redis.call('HGET', INDEX, name), '^[^:]*')
  redis.call('ZADD', REMOVED, integer(now), revision)
  redis.call('ZREMRANGEBYRANK', REMOVED, 0, -max_removed - 1)
  drop(name)
end

local function extend(followed_ms)
  for _, key in ipairs(KEYS) do
    redis.call('PEXPIREAT', key, integer(now + followed_ms))
  end
end

local function enter(name, revision, ttl_ms, record, followed_ms)
  local expires_at = ttl_ms == '' and '' or integer(now + ttl_ms)
  redis.call('HSET', INDEX, name, revision .. ':' .. expires_at)
  redis.call('HSET', SPECS, name, record)
  redis.call('ZADD', KEPT, integer(now + followed_ms), name)
  extend(followed_ms)
end

if redis.call('EXISTS', BOARD) == 0 then
  redis.call('UNLINK', INDEX, SPECS, KEPT, REMOVED)
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEPT, '-inf', integer(now))) do
  drop(name)
end
local entries = redis.call('HGETALL', INDEX)
for at = 1, #entries, 2 do
  local expires_at = tonumber(string.match(entries[at + 1], ':(%d+)$'))
  if expires_at and expires_at <= now then
    drop(entries[at])
  end
end
