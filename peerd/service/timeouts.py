"""Table of the time limits of calls and waits that are constants, each with the reason why it may be one.

A time limit is wrong if a larger model, a slower line or more peers would reach it. So work that transfers bytes gets
extra seconds for its bytes, or ends only when the peer falls silent. A test reads the code, and fails if a constant in
a time limit has no row here. Deadlines that a peer measures (averaging rounds, calls to stages and experts) are not
constants and have no row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SMALL: Final = "an exchange of some kilobytes between two peers"
AGAIN: Final = "on timeout the caller asks again, or continues without the answer"
PAUSE: Final = "an interval between two checks; it cancels nothing"
BYTES: Final = "seconds for the bytes are added"
LOCAL: Final = "local work, whose time does not depend on the model"
LEAVING: Final = "a leaving peer must end when the user expects it; the others continue without it"

# module.NAME: why it may be a constant
TIMEOUTS: Final[Mapping[str, str]] = {
    # commands and the daemon
    "peerd.commands.doctor.network_checks._CONNECT_S": SMALL,
    "peerd.commands.doctor.network_checks._VERDICT_S": SMALL,
    "peerd.commands.status.network_view.READ_S": AGAIN,
    "peerd.commands.status.status_board.LOOK_WAIT_S": AGAIN,
    "peerd.commands.status.swarm_view.SWARM_TIMEOUT_S": AGAIN,
    "peerd.control.company._FIRST_WORD_S": PAUSE,
    "peerd.control.socket.ANSWER_TIMEOUT_S": LOCAL,
    "peerd.daemon.WITHDRAW_S": LEAVING,
    "peerd.demo.story.START_S": LOCAL,
    # data and devices
    "peerd.compute.data.http_fetch.READ_TIMEOUT_S": BYTES,
    "peerd.compute.worker.CLOSE_TIMEOUT_S": LEAVING,
    # network
    "peerd.net.gateway.natpmp.FIRST_WAIT_S": SMALL,
    "peerd.net.host.failover._DIAL_S": SMALL,
    "peerd.net.host.identify._MORE_S": SMALL,
    "peerd.net.mdns._STOP_S": LEAVING,
    "peerd.net.relay.circuit_transport.CIRCUIT_ANSWER_S": SMALL,
    "peerd.net.relay.circuit_transport.CIRCUIT_REQUEST_S": SMALL,
    "peerd.net.relay.circuit_transport._LOOK_S": PAUSE,
    "peerd.net.relay.renewal._LOOK_S": PAUSE,
    "peerd.net.tcp.resolve.RESOLUTION_DELAY_S": PAUSE,
    "peerd.service.connectivity.hole_puncher.PUNCH_ATTEMPT_S": SMALL,
    "peerd.service.connectivity.hole_puncher._ANSWER_S": SMALL,
    "peerd.service.connectivity.hole_puncher._HANDSHAKE_S": SMALL,
    "peerd.service.connectivity.hole_puncher._LOOK_S": PAUSE,
    "peerd.service.connectivity.relay.CIRCUIT_REQUEST_S": SMALL,
    "peerd.service.connectivity.relay._LOOK_S": PAUSE,
    "peerd.service.connectivity.relay_client._CONNECT_S": SMALL,
    "peerd.service.network.link_watch._PAGE_TIMEOUT_S": SMALL,
    "peerd.service.network.link_watch._REPORT_TIMEOUT_S": SMALL,
    # calls
    "peerd.service.rpc.room.RPC_BUDGET_WAIT_S": AGAIN,
    "peerd.service.rpc.served_call.RPC_LEAST_BYTES_PER_S": BYTES,
    "peerd.service.rpc.served_call.RPC_MESSAGE_S": BYTES,
    "peerd.service.rpc.server.RPC_LEAST_BYTES_PER_S": BYTES,
    "peerd.service.rpc.server.RPC_MESSAGE_S": BYTES,
    # directory and access
    "peerd.service.access._SHOW_S": SMALL,
    "peerd.service.dht.dht.DIRECTORY_S": AGAIN,
    "peerd.service.dht.dht._WITHDRAW_S": LEAVING,
    "peerd.service.run_offer._ANSWER_S": SMALL,
    "peerd.service.run_services._PROBE_S": SMALL,
    # conducting
    "peerd.service.conductor.commit_proofs._ANSWER_S": SMALL,
    "peerd.service.conductor.conductor_client._ANEW_S": AGAIN,
    "peerd.service.conductor.conductor_client._GOODBYE_S": LEAVING,
    "peerd.service.conductor.conductor_client._LIST_S": SMALL,
    "peerd.service.conductor.duty._FIRST_LOOK_S": PAUSE,
    "peerd.service.conductor.duty._LOOK_FOR_S": AGAIN,
    "peerd.service.conductor.duty._LOOK_S": PAUSE,
    "peerd.service.conductor.duty._REFRESH_S": AGAIN,
    "peerd.service.conductor.orders._MOVE_TIMEOUT_S": "a slower member continues, and reports when it is done",
    "peerd.service.conductor.orders._TRANSFER_TIMEOUT_S": SMALL,
    "peerd.service.conductor.stage_finder._DIRECTORY_S": AGAIN,
    "peerd.service.conductor.rivals._ANSWER_S": SMALL,
    "peerd.service.conductor.rivals._CONNECT_S": SMALL,
    # averaging and stages
    "peerd.service.averaging.allreduce.RPC_ROUND_DEADLINE_S": "a week; a round ends when a peer falls silent",
    "peerd.service.averaging.allreduce._ANSWER_S": SMALL,
    "peerd.service.averaging.allreduce._LOOK_S": PAUSE,
    "peerd.service.averaging.preconnect._LOOK_S": PAUSE,
    "peerd.service.pipeline.stage_calls.RPC_ROUND_DEADLINE_S": "a week; a round ends when a peer falls silent",
    "peerd.service.pipeline.stage_peers._AFTER_REST_S": PAUSE,
    "peerd.service.pipeline.stage_peers._IDLE_LOOK_S": PAUSE,
    "peerd.service.pipeline.stage_peers._LOOK_S": PAUSE,
    "peerd.service.run_services._PREPARE_S": BYTES,
    "peerd.service.run_services._SILENCES": BYTES,
    "peerd.training.stage.announcement._ANNOUNCE_RARELY_S": PAUSE,
    "peerd.training.stage.announcement._ANNOUNCE_S": PAUSE,
    "peerd.training.replica.final_state._SILENT_S": BYTES,
    "peerd.training.replica.final_state._SLOW_LINE_BYTES_PER_S": BYTES,
    "peerd.training.stage.stage_move._LOOK_S": PAUSE,
    "peerd.training.stage.post._LEAVE_PATIENCE_S": LEAVING,
    "peerd.training.stage.post._LIST_S": LEAVING,
    "peerd.training.contributor._LEAVE_PATIENCE_S": LEAVING,
    # states and checkpoints
    "peerd.service.state.fetch._RELEASE_S": SMALL,
    "peerd.service.state.state_server._MEET_S": AGAIN,
    "peerd.training.checkpoints.checkpoint_recovery._PROOFS_S": AGAIN,
    "peerd.training.checkpoints.evidence_store._LAST_S": LEAVING,
    "peerd.training.stage.post._BRANCH_S": BYTES,
    "peerd.training.stage.post._SLOW_DISK_BYTES_PER_S": BYTES,
    "roles.backbone._ANNOUNCE_S": PAUSE,
    # experts
    "peerd.service.experts.contested._OWNERS_S": AGAIN,
    "peerd.service.experts.expert_directory.LOOKUP_S": AGAIN,
    "peerd.service.experts.vault.STATE_LEAST_BYTES_PER_S": BYTES,
    "peerd.service.experts.vault._SHAKE_S": BYTES,
    "peerd.service.experts.vault_fetch._LATE_S": AGAIN,
    "peerd.service.experts.vault_fetch._PIECE_S": "a piece has 1 MiB",
    "peerd.training.expert.sharing._LEAVING_S": LEAVING,
    "peerd.training.moe.expert_flights._CLOSING_S": PAUSE,
    "roles.trainer._LAST_EVALUATION_S": LEAVING,
    "roles.trainer._LAST_POSITION_S": LEAVING,
}
