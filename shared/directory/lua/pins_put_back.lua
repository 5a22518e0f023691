-- Want a pin that another board had, unless this board knows better.
--
-- ARGV[1] name
-- ARGV[2] revision
-- ARGV[3] time to live in milliseconds; empty: none
-- ARGV[4] PinSpec
-- ARGV[5] milliseconds that a pin outlives the last worker that kept it
-- ARGV[6] the board that it is meant for
-- ARGV[7] most pins
-- Returns OK or STALE.

if redis.call('GET', BOARD) ~= ARGV[6]
  or redis.call('HEXISTS', INDEX, ARGV[1]) == 1
  or redis.call('ZSCORE', REMOVED, ARGV[2])
  or redis.call('HLEN', INDEX) >= tonumber(ARGV[7]) then
  return 'STALE'
end
enter(ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]))
return 'OK'
