"""Tables of the house: which room may import which, and what does I/O. Changed on purpose, or not at all.

A room is a folder of peerd, or a file of its top folder. Rooms stand in an order from the bottom: each row names rooms
of earlier rows only, so there is no circle.
"""

from __future__ import annotations

# Room -> the rooms that it may import; all may import core.
ROOMS = {
    "core": "",
    "placement": "",
    "screen": "",
    "service": "",
    "signals": "",
    "codec/kernels": "",
    "log": "screen",
    "reach/gateway": "",
    "wire/rate": "",
    "run": "log",
    "wire/budget": "wire/rate",
    "codec": "codec/kernels run",
    "data/files": "run",
    "devices": "run",
    "dht/node": "wire/budget wire/rate",
    "messages": "run",
    "model/shapes": "run",
    "wire": "signals wire/budget",
    "data": "data/files run",
    "experts/rules": "messages run wire/rate",
    "model": "codec messages model/shapes run",
    "model/user_loop": "codec run",
    "placement/network": "messages wire/rate",
    "reach/messages": "wire",
    "rpc/methods": "messages wire/budget",
    "wire/noise": "wire",
    "wire/tcp": "run wire wire/budget wire/rate",
    "wire/yamux": "wire wire/rate",
    "commands/plan": "data log model/shapes placement run screen",
    "experts/owners": "experts/rules messages run",
    "model/stage": "codec data messages model model/shapes model/user_loop run",
    "pipeline/routes": "messages rpc/methods run wire/budget wire/rate",
    "rpc": "messages rpc/methods wire/budget wire/rate",
    "wire/link": "wire wire/budget wire/noise wire/rate wire/yamux",
    "experts/model": "codec messages model model/shapes model/stage run",
    "state": "messages rpc rpc/methods wire wire/rate",
    "wire/host": "signals wire wire/budget wire/link wire/noise wire/rate wire/tcp wire/yamux",
    "averaging": "messages rpc rpc/methods run signals wire/host",
    "compute/export": "codec data experts/model model model/shapes model/stage run",
    "reach": "reach/gateway reach/messages wire wire/host wire/link wire/rate wire/tcp",
    "dht": "dht/node messages reach rpc rpc/methods wire wire/host wire/link wire/rate",
    "reach/relay": "reach reach/messages wire wire/host wire/link wire/rate wire/tcp",
    "access": "dht messages rpc rpc/methods run wire/host wire/rate",
    "experts/calls": (
        "dht experts/owners experts/rules messages rpc rpc/methods run signals state wire/budget wire/host wire/rate"
    ),
    "swarm": "averaging dht messages rpc run signals wire wire/host wire/rate",
    "swarm/batch": "dht messages rpc swarm",
    "swarm/positions": "messages swarm",
    "swarm/rebalance": "messages swarm wire/rate",
    "swarm/steps": "averaging messages swarm swarm/batch swarm/positions swarm/rebalance",
    "swarm/conductor": (
        "averaging messages placement placement/network rpc rpc/methods run signals swarm swarm/batch "
        "swarm/positions swarm/rebalance swarm/steps wire/host wire/link wire/rate"
    ),
    "pipeline": (
        "averaging messages pipeline/routes rpc rpc/methods run signals swarm swarm/batch swarm/conductor wire/host "
        "wire/rate"
    ),
    "role": (
        "averaging dht experts/calls log messages pipeline rpc rpc/methods run state swarm swarm/batch "
        "swarm/conductor wire wire/host wire/link"
    ),
    "control": "dht log reach reach/gateway reach/relay role rpc run wire/host",
    "experts/hosting": "experts/calls experts/owners experts/rules messages role rpc rpc/methods run signals wire/rate",
    "pipeline/trainer": "codec data data/files messages pipeline pipeline/routes role signals swarm/batch swarm/steps",
    "registry": "log role run",
    "sim": "dht dht/node messages role rpc run wire wire/host wire/link",
    "state/catchup": "codec messages model model/stage role run signals state",
    "status": "dht log messages role rpc run screen swarm/batch swarm/conductor wire/host",
    "averaging/rounds": "averaging codec messages model/shapes model/stage role rpc run state state/catchup",
    "commands": "access compute/export control experts/calls log messages model registry role run wire wire/tcp",
    "commands/doctor": (
        "access codec/kernels data data/files dht log model model/shapes model/stage reach reach/messages registry "
        "role run wire wire/host wire/tcp"
    ),
    "state/checkpoints": "messages model model/stage role run signals state state/catchup swarm",
    "status/view": "log screen status",
    "daemon": "access control devices log messages role run status status/view wire/host wire/tcp",
    "demo": "compute/export data experts/calls model/stage run screen status status/view",
    "pipeline/stage": (
        "averaging averaging/rounds codec codec/kernels data experts/model messages model model/shapes model/stage "
        "pipeline pipeline/routes placement role rpc run signals state/catchup state/checkpoints swarm swarm/batch "
        "swarm/conductor swarm/rebalance swarm/steps wire/budget"
    ),
    "experts/trainer": (
        "codec experts/model log messages model/shapes model/stage pipeline pipeline/routes pipeline/stage role run "
        "signals swarm/batch wire/rate"
    ),
    "launch": "access control daemon log role run wire wire/tcp",
    "training/user_loop": (
        "experts/calls messages model/stage pipeline/routes pipeline/stage pipeline/trainer role signals "
        "swarm/batch wire/rate"
    ),
    "cli": (
        "commands commands/doctor commands/plan control daemon demo launch log messages model registry role run "
        "status status/view"
    ),
    "library": (
        "control daemon experts/model launch messages model model/stage model/user_loop role run training/user_loop"
    ),
    "__main__": "cli",
}
# Room -> its files that do I/O, or * for all; every other file only decides: it imports nothing that does I/O.
DOES_IO = {
    "__main__": "*",
    "access": "access_guard token_files",
    "averaging": "allreduce_service line_speeds open_round",
    "averaging/rounds": "*",
    "cli": "*",
    "codec": "*",
    "codec/kernels": "cuda native ops reference",
    "commands": "*",
    "commands/doctor": "*",
    "commands/plan": "*",
    "compute/export": "*",
    "control": "*",
    "daemon": "*",
    "data": "corpus corpus_digest readers shuffled_source stream text_stream user_dataset",
    "data/files": "*",
    "demo": "*",
    "devices": "*",
    "dht": "bootstrap dht requests",
    "experts/calls": "*",
    "experts/hosting": "*",
    "experts/model": "*",
    "experts/trainer": "*",
    "launch": "*",
    "library": "*",
    "log": "*",
    "model": "*",
    "model/stage": "*",
    "model/user_loop": "*",
    "pipeline": "*",
    "pipeline/stage": "*",
    "pipeline/trainer": "*",
    "reach": "autonat hole_puncher lan_discovery mdns port_mapping",
    "reach/gateway": "natpmp upnp",
    "reach/relay": "*",
    "registry": "*",
    "role": "*",
    "rpc": "*",
    "run": "config home local_code typed_yaml user_code",
    "screen": "full_screen",
    "signals": "*",
    "sim": "*",
    "state": "piece_fetch snapshot state_room state_server",
    "state/catchup": "*",
    "state/checkpoints": "*",
    "status": "learning_curve network_view run_monitor status_board swarm_view",
    "status/view": "progress_line status_view swarm_words waits watch_view",
    "swarm": "contributions dial_trainers directory kept_links peer_links run_view",
    "swarm/batch": "counted_record",
    "swarm/conductor": "*",
    "training/user_loop": "*",
    "wire": "clock faults race tcp_info timer transport",
    "wire/host": "*",
    "wire/link": "*",
    "wire/tcp": "*",
}
# Rooms that may import torch.
WITH_TORCH = (
    "codec codec/kernels compute/export data experts/model experts/trainer library model model/stage "
    "model/user_loop pipeline/stage pipeline/trainer run state/catchup state/checkpoints training/user_loop"
)
# What a role (a file of roles/) may import of peerd.
ROLE_IMPORTS = "averaging core data experts messages model pipeline role rpc run signals state status swarm wire"
# Rooms that may read the wall clock; all others get the time from a Clock.
WALL_CLOCK = (
    "commands commands/doctor commands/plan control data/files demo experts/trainer launch library log model "
    "model/stage screen status/view"
)
