"""The run's state machine: `apply(command, now)` decides and emits events; the state is the fold of its events.

`events` are what is journaled, `state` is what they fold into, `soft` is what may be lost in a restart (leases, queues,
durations). Decisions are grouped by what they are about: `membership`, `training`, `phases`, `merging`, `auditing`,
`books`. `machine.Machine` is the one door.
"""
