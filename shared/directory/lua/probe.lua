-- Do what the other scripts do, on keys that nobody reads, and leave nothing: an error tells what the store refuses.
--
-- KEYS[1] hash
-- KEYS[2] stream
-- KEYS[3] set
-- KEYS[4] set
-- KEYS[5] string
-- KEYS[6] zset
-- Returns OK, or the first error.

local hash, stream, set, renamed, text, sorted = unpack(KEYS)
local first_error
local function try(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err and not first_error then
    first_error = reply
  end
end

-- First, since a full store lets a script go on that has written once.
try('HSET', hash, 'seq', 0, 'epoch', 0)
try('HGET', hash, 'seq')
try('HMGET', hash, 'seq', 'epoch')
try('HGETALL', hash)
try('HEXISTS', hash, 'seq')
try('HLEN', hash)
try('HDEL', hash, 'epoch')
try('PEXPIRE', hash, 1000)
try('PEXPIRETIME', hash)
try('PEXPIREAT', hash, 1)
try('PTTL', hash)
try('XADD', stream, 'MAXLEN', '~', 1, '*', 'seq', 0)
try('XTRIM', stream, 'MINID', 0)
try('XREVRANGE', stream, '+', '-', 'COUNT', 1)
try('XREAD', 'STREAMS', stream, 0)
try('TYPE', stream)
try('EXISTS', stream)
try('SADD', set, 'a', 'b')
try('SREM', set, 'b')
try('SCARD', set)
try('SMEMBERS', set)
try('SRANDMEMBER', set, 1)
try('SSCAN', set, 0)
try('SMISMEMBER', set, 'a')
try('RENAME', set, renamed)
try('SET', text, 'a')
try('GET', text)
try('ZADD', sorted, 1, 'a')
try('ZSCORE', sorted, 'a')
try('ZRANGEBYSCORE', sorted, 0, 0)
try('ZREMRANGEBYRANK', sorted, 1, 1)
try('ZREM', sorted, 'a')
try('TIME')
try('UNLINK', unpack(KEYS))
return first_error or 'OK'
