-- Count a router among the live ones, and tell its place among them.
--
-- KEYS[1] routers  zset: ids by the time, in milliseconds, at which they run out
-- ARGV[1] router id
-- ARGV[2] lease in milliseconds
-- ARGV[3] most routers
-- Returns {how many live ones have a lower id, how many there are}.

if redis.call('TYPE', KEYS[1]).ok ~= 'zset' then
  redis.call('UNLINK', KEYS[1])
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)) do
  redis.call('ZREM', KEYS[1], id)
end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - ARGV[3])
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
local rank = 0
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '+inf')
for _, id in ipairs(ids) do
  if id < ARGV[1] then
    rank = rank + 1
  end
end
return {rank, #ids}
