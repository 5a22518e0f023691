-- What all scripts of a worker's publisher begin with: its lease, and whether the publisher's epoch is the current one.
--
-- KEYS[1] meta  hash
-- ARGV[1] epoch
-- Leaves the refusal STALE or UNKNOWN, or nil.

local lease = redis.call('HMGET', KEYS[1], 'epoch', 'seq', 'staged')
local current_epoch, last_seq, staged_epoch = lease[1], tonumber(lease[2]), lease[3]
local expires_at_ms = redis.call('PEXPIRETIME', KEYS[1])
local refusal
-- A lease without an end is none of ours, and what is to live by it would end at once.
if not current_epoch or expires_at_ms < 0 then
  refusal = 'UNKNOWN'
elseif current_epoch ~= ARGV[1] then
  refusal = 'STALE'
end
