"""The miner as a process."""

from __future__ import annotations

from iota.net.peer import Caller
from iota.nodes.effects import Compute
from iota.nodes.miner.device import pick_device, room_here
from iota.nodes.miner.node import Miner, MinerSettings
from iota.nodes.peer_process import Effects, Line, PeerOptions, attend
from iota.store.remote import Objects


async def serve(options: PeerOptions, effects: Effects) -> bool:
    """Mine until the run ends (True), or until asked to stop and the work in hand is done (False).

    Raises IotaError `no_device` and what `attend` raises."""
    device = pick_device(options.device)
    effects.say(f"computing on {device} in {options.dtype or 'the dtype of the run'}")
    settings = MinerSettings(
        folder=options.folder,
        device=device,
        dtype=options.dtype,
        max_memory=options.max_memory,
        max_disk=options.max_disk,
        owner=options.owner,
        give_up=options.give_up or None,
        room=room_here(device, options.folder),
    )

    def make(caller: Caller, objects: Objects, compute: Compute) -> tuple[Miner, Line]:
        miner = Miner(
            settings,
            caller,
            objects,
            clock=effects.clock,
            compute=compute,
            entropy=effects.entropy,
            report=effects.say,
        )
        return miner, miner.status.line

    return await attend(options, effects, "miner", make)
