"""The validator as a process. Torch is loaded in its child alone."""

from __future__ import annotations

from iota.config.schema import Manifest
from iota.net.peer import Caller
from iota.nodes.effects import Compute
from iota.nodes.peer_process import Effects, Line, PeerOptions, attend
from iota.nodes.validator.child import ChildReplayer
from iota.nodes.validator.node import Validator, ValidatorSettings
from iota.store.remote import Objects


async def serve(options: PeerOptions, effects: Effects) -> bool:
    """Judge until the run ends (True), or until asked to stop and the task in hand is done (False).

    `options.device` "auto" is resolved in the child; `max_memory`: bytes that the child may take beside torch itself;
    `threads`: the child's. Raises IotaError as `attend`."""
    settings = ValidatorSettings(
        folder=options.folder,
        device=options.device,
        dtype=options.dtype,
        memory=options.max_memory,
        owner=options.owner,
        give_up=options.give_up or None,
    )

    def replayer(manifest: Manifest) -> ChildReplayer:
        return ChildReplayer(
            manifest.config,
            manifest.cuts,
            effects.clock,
            device=options.device,
            dtype=options.dtype,
            threads=options.threads,
            memory=options.max_memory,
        )

    def make(caller: Caller, objects: Objects, compute: Compute) -> tuple[Validator, Line]:
        validator = Validator(
            settings,
            caller,
            objects,
            replayer,
            clock=effects.clock,
            compute=compute,
            entropy=effects.entropy,
            report=effects.say,
        )
        return validator, validator.line

    return await attend(options, effects, "validator", make)
