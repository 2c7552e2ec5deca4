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
    "codec/format": "",
    "log": "screen",
    "reach/gateway": "",
    "wire/rate": "",
    "codec/kernels": "codec/format",
    "run": "codec/format log",
    "wire/budget": "wire/rate",
    "codec": "codec/format codec/kernels run",
    "data/files": "run",
    "dht/node": "wire/budget wire/rate",
    "messages": "codec/format run",
    "model/shapes": "codec/format run",
    "wire": "wire/budget",
    "data": "data/files run",
    "experts/rules": "messages run wire/rate",
    "model": "codec codec/format messages model/shapes run",
    "model/user_loop": "codec codec/format run",
    "placement/network": "messages wire/rate",
    "reach/messages": "wire",
    "rpc/methods": "codec/format messages wire/budget",
    "wire/noise": "wire",
    "wire/tcp": "run wire wire/budget wire/rate",
    "wire/yamux": "wire wire/rate",
    "cli/plan": "data log model/shapes placement run screen",
    "experts/owners": "experts/rules messages run",
    "model/stage": "codec codec/format data messages model model/shapes model/user_loop run",
    "pipeline/routes": "codec/format messages rpc/methods run wire/budget wire/rate",
    "rpc": "codec/format messages rpc/methods wire/budget wire/rate",
    "wire/link": "wire wire/budget wire/noise wire/rate wire/yamux",
    "experts/model": "codec codec/format messages model model/shapes model/stage run",
    "state": "codec/format messages rpc rpc/methods wire wire/rate",
    "wire/host": "wire wire/budget wire/link wire/noise wire/rate wire/tcp wire/yamux",
    "averaging": "codec/format messages rpc rpc/methods run wire/host",
    "export": "codec data experts/model model model/shapes model/stage run",
    "reach": "reach/gateway reach/messages wire wire/host wire/link wire/rate wire/tcp",
    "dht": "dht/node messages reach rpc rpc/methods wire wire/host wire/link wire/rate",
    "reach/relay": "reach reach/messages wire wire/host wire/link wire/rate wire/tcp",
    "access": "dht messages rpc rpc/methods run wire/host wire/rate",
    "experts/calls": (
        "codec/format dht experts/owners experts/rules messages rpc rpc/methods run state wire/budget wire/host "
        "wire/rate"
    ),
    "swarm": "averaging dht messages rpc run wire wire/host wire/rate",
    "swarm/batch": "dht messages rpc swarm",
    "swarm/positions": "messages swarm",
    "swarm/rebalance": "messages swarm wire/rate",
    "swarm/steps": "averaging messages swarm swarm/batch swarm/positions swarm/rebalance",
    "swarm/conductor": (
        "averaging messages placement placement/network rpc rpc/methods run swarm swarm/batch swarm/positions "
        "swarm/rebalance swarm/steps wire/host wire/link wire/rate"
    ),
    "pipeline": (
        "averaging codec/format messages pipeline/routes rpc rpc/methods run swarm swarm/batch swarm/conductor "
        "wire/host wire/rate"
    ),
    "role": (
        "averaging dht experts/calls log messages pipeline rpc rpc/methods run state swarm swarm/batch "
        "swarm/conductor wire wire/host wire/link"
    ),
    "daemon/control": "dht log model reach reach/gateway reach/relay role rpc run wire/host",
    "experts/hosting": "experts/calls experts/owners experts/rules messages role rpc rpc/methods run wire/rate",
    "pipeline/trainer": "codec data data/files messages pipeline pipeline/routes role swarm/batch swarm/steps",
    "state/catchup": "codec messages model model/stage role run state",
    "status": "dht log messages role rpc run screen swarm/batch swarm/conductor wire/host",
    "averaging/rounds": (
        "averaging codec codec/format messages model/shapes model/stage role rpc run state state/catchup"
    ),
    "state/checkpoints": "messages model model/stage role run state state/catchup swarm",
    "status/view": "log screen status",
    "cli/demo": "data experts/calls export model/stage run screen status status/view",
    "daemon": "access daemon/control log messages role run status status/view wire wire/host wire/tcp",
    "pipeline/stage": (
        "averaging averaging/rounds codec codec/format codec/kernels data experts/model messages model model/shapes "
        "model/stage pipeline pipeline/routes placement role rpc run state/catchup state/checkpoints swarm "
        "swarm/batch swarm/conductor swarm/rebalance swarm/steps wire/budget"
    ),
    "cli/doctor": (
        "access codec/kernels daemon data data/files dht log model model/shapes model/stage reach reach/messages "
        "role run wire wire/host wire/tcp"
    ),
    "experts/trainer": (
        "codec codec/format experts/model log messages model/shapes model/stage pipeline pipeline/routes "
        "pipeline/stage role run swarm/batch wire/rate"
    ),
    "library/roles": (
        "experts/calls messages model/stage pipeline/routes pipeline/stage pipeline/trainer role swarm/batch wire/rate"
    ),
    "cli": (
        "access cli/demo cli/doctor cli/plan daemon daemon/control experts/calls export log messages model role run "
        "status status/view wire wire/tcp"
    ),
    "library": "daemon daemon/control experts/model library/roles messages model model/stage model/user_loop role run",
    "__main__": "cli",
}
# Room -> its files that do I/O, or * for all; every other file only decides: it imports nothing that does I/O.
DOES_IO = {
    "__main__": "*",
    "access": "access_guard token_files",
    "averaging": "allreduce line_speeds open_round",
    "averaging/rounds": "*",
    "cli": "*",
    "cli/demo": "*",
    "cli/doctor": "*",
    "cli/plan": "*",
    "codec": "*",
    "codec/kernels": "cuda native ops reference",
    "core": "signals",
    "daemon": "*",
    "daemon/control": "*",
    "data": "corpus corpus_digest readers shuffled_source stream text_stream user_dataset",
    "data/files": "*",
    "dht": "bootstrap dht requests",
    "experts/calls": "*",
    "experts/hosting": "*",
    "experts/model": "*",
    "experts/trainer": "*",
    "export": "*",
    "library": "*",
    "library/roles": "*",
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
    "role": "*",
    "rpc": "*",
    "run": "config home local_code typed_yaml user_code",
    "screen": "full_screen",
    "state": "piece_fetch snapshot state_room state_server",
    "state/catchup": "*",
    "state/checkpoints": "*",
    "status": "learning_curve network_view run_monitor status_board swarm_view",
    "status/view": "progress_line status_view swarm_words waits watch_view",
    "swarm": "contributions dial_trainers directory kept_links peer_links run_view",
    "swarm/batch": "counted_record",
    "swarm/conductor": "*",
    "wire": "clock faults race tcp_info timer transport",
    "wire/host": "*",
    "wire/link": "*",
    "wire/tcp": "*",
}
# Rooms that may import torch.
WITH_TORCH = (
    "codec codec/kernels data experts/model experts/trainer export library library/roles model model/stage "
    "model/user_loop pipeline/stage pipeline/trainer run state/catchup state/checkpoints"
)
# What a role (a file of roles/) may import of peerd.
ROLE_IMPORTS = "averaging core data experts messages model pipeline role rpc run state status swarm wire"
# Rooms that may read the wall clock; all others get the time from a Clock.
WALL_CLOCK = (
    "cli cli/demo cli/doctor cli/plan daemon daemon/control data/files experts/trainer library log model "
    "model/stage screen status/view"
)
