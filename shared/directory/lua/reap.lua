-- Drop what a worker without a lease has left.
--
-- KEYS[1] meta    hash
-- KEYS[2] blocks  set
-- KEYS[3] events  stream
-- KEYS[4] staged  set
-- Returns the number of keys dropped; 0 for a worker that lives.

if redis.call('PEXPIRETIME', KEYS[1]) > 0 then
  return 0
end
return redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3], KEYS[4])
