-- How a worker's lease stands, and whether the store still holds what the reader put beside it with its last look.
--
-- KEYS[1] meta    hash
-- KEYS[2] canary  string
-- ARGV[1] life of the canary in milliseconds
-- Returns {{instance, epoch, seq}, time that the lease has left in milliseconds, 1 if the canary was kept, else 0}.

-- What the store holds is worth reading where it takes no writes, too.
local kept = redis.pcall('SET', KEYS[2], '', 'PX', ARGV[1], 'XX')
if not kept then
  redis.pcall('SET', KEYS[2], '', 'PX', ARGV[1])
end
return {
  redis.call('HMGET', KEYS[1], 'instance', 'epoch', 'seq'),
  redis.call('PTTL', KEYS[1]),
  kept and kept.ok and 1 or 0,
}
