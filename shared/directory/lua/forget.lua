-- Drop the lease of one life of a worker and everything that lived by it.
--
-- KEYS[1] meta    hash
-- KEYS[2] blocks  set
-- KEYS[3] events  stream
-- KEYS[4] staged  set
-- ARGV[1] instance
-- Returns OK; UNKNOWN when that life holds no lease.

if redis.call('HGET', KEYS[1], 'instance') ~= ARGV[1] then
  return 'UNKNOWN'
end
redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3], KEYS[4])
return 'OK'
