"""The operations on the registry that Redis does as a whole, as scripts in Lua. Pure."""

from __future__ import annotations

from typing import Final

#: Writes records of fragments unless a later version stands there: a deposed aggregator may still be writing.
WRITE_FRAGMENTS: Final = """
local written = 0
for i = 2, #ARGV, 4 do
  local held = redis.call('HGET', KEYS[1], ARGV[i])
  local later = false
  if held then
    local epoch, version = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
    held = cjson.decode(held)
    later = held.epoch > epoch or (held.epoch == epoch and held.version > version)
  end
  if not later then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 3])
    written = written + 1
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return written
"""

#: Writes what a broker has heard of islands, unless another one has heard of them since: who has left for it is
#: remembered here for a while, and written with all else. A time that has not come yet is not believed: clocks go back.
WRITE_MEMBERS: Final = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local written = 0
for i = 3, #ARGV, 3 do
  local island, heard = ARGV[i], now - tonumber(ARGV[i + 1])
  local key = KEYS[2] .. island
  local other = redis.call('HGET', key, 'broker')
  local held = tonumber(redis.call('ZSCORE', KEYS[1], island) or '-1')
  if not other or other == ARGV[2] or held <= heard or held > now then
    redis.call('ZADD', KEYS[1], string.format('%.6f', heard), island)
    redis.call('HSET', key, 'broker', ARGV[2], unpack(cjson.decode(ARGV[i + 2])))
    redis.call('EXPIRE', key, ARGV[1])
    written = written + 1
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return written
"""

#: Takes the name of a run, unless a run has it: one that was written to within a week, or that anybody ever led.
CLAIM: Final = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local written = redis.call('ZSCORE', KEYS[1], ARGV[1])
if redis.call('EXISTS', KEYS[2]) == 1 or (written and now - tonumber(written) < tonumber(ARGV[2])) then
  return 0
end
redis.call('ZADD', KEYS[1], string.format('%.6f', now), ARGV[1])
return 1
"""
