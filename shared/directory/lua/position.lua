-- Where a worker stands, at one moment: a batch is either in the set that is scanned after this, or in the stream from
-- here on. Reads only.
--
-- KEYS[1] meta    hash
-- KEYS[2] events  stream
-- Returns {{instance, epoch, seq}, time that the lease has left in milliseconds, id of the stream's last entry or ''}.

local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
return {
  redis.call('HMGET', KEYS[1], 'instance', 'epoch', 'seq'),
  redis.call('PTTL', KEYS[1]),
  last and last[1] or '',
}
