-- Do what the other scripts do, on keys that nobody reads, and leave nothing: an error tells what the store refuses.
--
-- KEYS[1] hash
-- KEYS[2] stream
-- KEYS[3] set
-- KEYS[4] set
-- Returns OK.

local now = redis.call('TIME')
redis.call('UNLINK', unpack(KEYS))
redis.call('HSET', KEYS[1], 'seq', 0, 'epoch', 0)
redis.call('HGET', KEYS[1], 'seq')
redis.call('HMGET', KEYS[1], 'seq', 'epoch')
redis.call('HDEL', KEYS[1], 'epoch')
redis.call('PEXPIRE', KEYS[1], 1000)
redis.call('PEXPIREAT', KEYS[1], now[1] * 1000 + 1000)
redis.call('PEXPIRETIME', KEYS[1])
redis.call('PTTL', KEYS[1])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1, '*', 'seq', 0)
redis.call('TYPE', KEYS[2])
redis.call('SADD', KEYS[3], 'a', 'b')
redis.call('SREM', KEYS[3], 'b')
redis.call('SCARD', KEYS[3])
redis.call('SMEMBERS', KEYS[3])
redis.call('SMISMEMBER', KEYS[3], 'a')
redis.call('RENAME', KEYS[3], KEYS[4])
redis.call('UNLINK', unpack(KEYS))
return 'OK'
