-- Want a pin no longer.
--
-- ARGV[1] name
-- ARGV[2] revision that must still stand; empty: any
-- ARGV[3] most revisions remembered as given up
-- Returns OK, or STALE if that pin is not there.

local former = redis.call('HGET', INDEX, ARGV[1])
if not former or (ARGV[2] ~= '' and string.match(former, '^[^:]*') ~= ARGV[2]) then
  return 'STALE'
end
give_up(ARGV[1], tonumber(ARGV[3]))
redis.call('PEXPIREAT', REMOVED, redis.call('PEXPIRETIME', BOARD))
return 'OK'
