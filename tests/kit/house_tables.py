"""Tables of the house: which room may import which, and what does I/O. Changed on purpose, or not at all.

A room is a folder of peerd, or a file of its top folder. Rooms stand in an order from the bottom: each row names rooms
of earlier rows only, so there is no circle.
"""

from __future__ import annotations

# Room -> the rooms that it may import; all may import core.
ROOMS = {
    "core": "",
    "machine/placement": "",
    "screen": "",
    "signals": "",
    "compute/kernels": "",
    "core/protobuf": "",
    "core/run": "",
    "home": "",
    "local_code": "",
    "log": "screen",
    "machine/rate": "",
    "net/gateway": "",
    "contents": "core/run",
    "core/experts": "core/run",
    "devices": "core/run",
    "machine/budget": "machine/rate",
    "typed_yaml": "log",
    "config": "contents core/run typed_yaml",
    "core/messages": "core/experts core/run",
    "core/model": "core/experts core/run",
    "machine/dht": "machine/budget machine/rate",
    "compute": "contents core/messages core/run home local_code",
    "machine/access": "core/messages",
    "machine/averaging": "core/messages",
    "machine/connectivity": "core/messages core/protobuf machine/budget machine/rate",
    "machine/experts": "core/experts core/messages machine/rate",
    "machine/network": "core/messages machine/rate",
    "machine/rpc": "core/messages machine/budget",
    "machine/state": "core/messages machine/rate",
    "commands/plan": "compute config core/model core/run log machine/placement screen typed_yaml",
    "compute/codec": "compute compute/kernels core/run",
    "compute/data": "compute contents core/run local_code",
    "compute/user_loop": "compute core/run",
    "machine": "machine/connectivity",
    "machine/owners": "core/experts core/messages machine/experts",
    "machine/pipeline": "core/messages core/run machine/budget machine/rate machine/rpc",
    "machine/swarm": "core/messages machine/averaging",
    "net": "machine/connectivity signals",
    "service/rpc": "core/messages machine/budget machine/rate machine/rpc",
    "compute/model": (
        "compute compute/codec compute/user_loop contents core/experts core/messages core/model core/run local_code"
    ),
    "machine/batch": "core/messages machine/swarm",
    "machine/mux": "machine machine/rate",
    "machine/positions": "core/messages machine/swarm",
    "machine/rebalance": "core/messages machine/rate machine/swarm",
    "machine/secure": "core/protobuf machine",
    "net/tcp": "core/run machine/budget machine/connectivity machine/rate net",
    "service/state": "core/messages machine/rate machine/rpc machine/state net service/rpc",
    "compute/experts": (
        "compute compute/codec compute/model contents core/experts core/messages core/model core/run local_code"
    ),
    "machine/conductor": (
        "core/messages machine/averaging machine/batch machine/positions machine/rebalance machine/swarm"
    ),
    "net/link": "machine machine/budget machine/connectivity machine/mux machine/rate machine/secure net",
    "service/pipeline": (
        "core/messages core/run machine/batch machine/pipeline machine/rate machine/rpc service/rpc signals"
    ),
    "compute/export": "compute compute/data compute/experts compute/model core/experts core/model core/run",
    "net/host": (
        "core/protobuf machine/budget machine/connectivity machine/mux machine/rate machine/secure net net/link "
        "net/tcp signals"
    ),
    "net/relay": "core/protobuf machine/connectivity net net/host net/link",
    "service/dht": (
        "core/messages machine machine/connectivity machine/dht machine/rate machine/rpc net net/host net/link "
        "service/rpc"
    ),
    "service/connectivity": (
        "core/protobuf machine/connectivity machine/rate net net/gateway net/host net/link net/relay net/tcp"
    ),
    "service/experts": (
        "core/experts core/messages core/run home machine/budget machine/experts machine/owners machine/rate "
        "machine/rpc machine/state net/host service/dht service/rpc service/state signals"
    ),
    "service/swarm": (
        "core/messages home machine/batch machine/connectivity machine/swarm net/host service/dht service/rpc signals"
    ),
    "service/conductor": (
        "core/messages core/run machine/averaging machine/conductor machine/network machine/placement "
        "machine/positions machine/rate machine/rebalance machine/rpc machine/swarm net/host service/rpc "
        "service/swarm signals"
    ),
    "service/averaging": (
        "core/messages machine/averaging machine/connectivity machine/rpc net/host service/conductor service/rpc "
        "signals"
    ),
    "service/network": (
        "core/messages core/run machine/connectivity machine/network net/host net/link service/conductor service/rpc"
    ),
    "service": (
        "contents core/messages core/run machine/access machine/rate machine/rpc machine/swarm net net/host "
        "net/link service/averaging service/conductor service/dht service/experts service/network service/pipeline "
        "service/rpc service/state service/swarm"
    ),
    "control": (
        "core/messages core/run home log machine/access machine/connectivity net/gateway net/host net/relay service "
        "service/connectivity service/dht service/rpc"
    ),
    "role": "core/run log net/host service service/dht service/rpc",
    "sim": "core/experts core/messages machine/dht net net/host net/link service service/dht service/rpc",
    "commands/status": (
        "control core/messages core/run log machine/batch net/host screen service service/dht service/network "
        "service/rpc service/swarm"
    ),
    "registry": "local_code log role",
    "training": (
        "compute compute/codec compute/data compute/model core/messages core/model core/run machine/averaging "
        "machine/batch machine/conductor machine/pipeline machine/placement role service service/pipeline "
        "service/rpc signals"
    ),
    "training/catchup": "compute compute/model core/messages core/run machine/state role service service/state signals",
    "training/expert": (
        "core/experts core/messages core/run machine/experts machine/owners machine/rate machine/rpc role "
        "service/experts service/rpc signals"
    ),
    "commands": (
        "compute compute/export config contents control core/messages core/run home log net net/tcp registry "
        "service service/experts typed_yaml"
    ),
    "commands/doctor": (
        "compute compute/data compute/kernels compute/model control core/model core/protobuf core/run home log "
        "machine machine/connectivity net net/host net/tcp registry service service/connectivity service/dht"
    ),
    "daemon": "commands/status contents control core/messages core/run devices home log net/host net/tcp role service",
    "demo": (
        "commands/status compute compute/data compute/export compute/model config control core/experts core/run "
        "home screen service/experts"
    ),
    "training/checkpoints": (
        "compute compute/model core/messages core/run home machine/swarm role service service/state signals "
        "training/catchup"
    ),
    "launch": "control daemon home log net net/tcp role service",
    "training/stage": (
        "compute compute/codec compute/experts compute/kernels compute/model core/messages core/model core/run "
        "machine/averaging machine/batch machine/budget machine/conductor machine/pipeline machine/rebalance "
        "machine/swarm role service service/conductor service/network service/pipeline service/rpc service/state "
        "service/swarm signals training training/catchup training/checkpoints"
    ),
    "cli": (
        "commands commands/doctor commands/plan commands/status compute config control core/messages core/run "
        "daemon demo home launch log registry role"
    ),
    "training/moe": (
        "compute/codec compute/experts compute/model core/experts core/messages core/model core/run log "
        "machine/batch machine/pipeline machine/rate role service/pipeline signals training/stage"
    ),
    "training/replica": "role service training/stage",
    "__main__": "cli",
    "training/user_loop": (
        "compute/model core/messages machine/batch machine/pipeline machine/rate role service service/experts "
        "signals training training/replica training/stage"
    ),
    "library": (
        "compute/experts compute/model compute/user_loop config control core/experts core/messages core/run daemon "
        "launch role training/user_loop typed_yaml"
    ),
}
# Room -> its files that do I/O, or * for all; every other file only decides: it imports nothing that does I/O.
DOES_IO = {
    "__main__": "*",
    "cli": "*",
    "commands": "*",
    "commands/doctor": "*",
    "commands/plan": "*",
    "commands/status": "network_view progress_line status_board status_view swarm_view swarm_words waits watch_view",
    "compute": "checkpoint devices file_index flat frozen_state gpu run_record tensors user_code worker",
    "compute/codec": "*",
    "compute/data": (
        "corpus corpus_digest file_fetch http_fetch public_connection readers remote_files shuffled_source stream "
        "text_stream user_dataset"
    ),
    "compute/experts": "*",
    "compute/export": "*",
    "compute/kernels": "cuda native ops reference",
    "compute/model": "*",
    "compute/user_loop": "*",
    "config": "*",
    "control": "company connectivity guest leave_deadlines memory_limit open_hours rester socket token_files",
    "daemon": "*",
    "demo": "*",
    "devices": "*",
    "home": "*",
    "launch": "*",
    "library": "*",
    "local_code": "*",
    "log": "*",
    "net": "*",
    "net/gateway": "natpmp upnp",
    "net/host": "*",
    "net/link": "*",
    "net/relay": "*",
    "net/tcp": "*",
    "registry": "*",
    "role": "*",
    "screen": "full_screen",
    "service": "*",
    "service/averaging": "allreduce open_round preconnect",
    "service/conductor": "*",
    "service/connectivity": "*",
    "service/dht": "bootstrap dht requests",
    "service/experts": "*",
    "service/network": "*",
    "service/pipeline": "*",
    "service/rpc": "*",
    "service/state": "*",
    "service/swarm": "*",
    "signals": "*",
    "sim": "*",
    "training": "*",
    "training/catchup": "*",
    "training/checkpoints": "*",
    "training/expert": "*",
    "training/moe": "*",
    "training/replica": "*",
    "training/stage": "*",
    "training/user_loop": "*",
    "typed_yaml": "*",
}
# Rooms that may import torch.
WITH_TORCH = (
    "compute compute/codec compute/data compute/experts compute/export compute/kernels compute/model "
    "compute/user_loop library training training/catchup training/checkpoints training/moe training/stage "
    "training/user_loop"
)
# What a role (a file of roles/) may import of peerd.
ROLE_IMPORTS = "compute core machine role service signals training"
# Rooms that may read the wall clock; all others get the time from a Clock.
WALL_CLOCK = (
    "commands commands/doctor commands/plan commands/status compute compute/data compute/model control demo launch "
    "library log screen training/moe"
)
