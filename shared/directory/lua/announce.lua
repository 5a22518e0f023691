-- List a worker's id, and keep the list for at least as long as the worker's lease.
--
-- KEYS[1] workers  set
-- ARGV[1] worker id
-- ARGV[2] lease in milliseconds
-- Returns OK.

if redis.call('TYPE', KEYS[1]).ok ~= 'set' then
  redis.call('UNLINK', KEYS[1])
end
redis.call('SADD', KEYS[1], ARGV[1])
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 'OK'
