"""Every limit on the memory and work that peers may demand of this one, each with its reason."""

from __future__ import annotations

from typing import Final

# --- addresses -------------------------------------------------------------------------------------------------
ADDRS_PER_PEER: Final = 16  # more addresses than a peer with several networks and relays needs
ADDR_BYTES: Final = 512  # a circuit address with two peer ids takes about 130
LAN_NAMES: Final = 64  # names found in the local network and not yet resolved; a home has a few machines
LAN_TEXT_BYTES: Final = 4096  # read of one neighbour's announcement: sixteen addresses of 255 bytes
LAN_PEERS: Final = 64  # neighbours that are remembered
LAN_DIALS: Final = 4  # concurrent dials to neighbours

# --- our own faults ----------------------------------------------------------------------------------------------
FAULT_PLACES: Final = 64  # lines of code with a counter of their own; a healthy program needs none
FAULT_CHARS: Final = 300  # kept of an error's message, which may contain text from a peer

# --- tensor frames ---------------------------------------------------------------------------------------------
FRAME_DIMS: Final = 8  # more dimensions than any tensor that a model sends
FRAME_ELEMENTS: Final = 1 << 31  # of one tensor; keeps every product far from overflow in foreign code
FRAME_BYTES: Final = 256 << 20  # one tensor, coded or not: 8 x 2048 x 4096 activations in fp32

# --- text fetched over http(s) -----------------------------------------------------------------------------------
INDEX_BYTES: Final = 32 << 20  # a list of files takes about 150 bytes per file
INDEX_FILES: Final = 200_000  # the most that a list of that size can contain
INDEX_NAME_CHARS: Final = 512  # of a path below the URL; file systems allow 255 for each component
DATA_FILE_BYTES: Final = 8 << 30  # one file, which the cache stores as a whole
HTTP_REDIRECTS: Final = 5  # to a mirror, a region, a signed URL; more than that is a loop
HTTP_PAUSE_S: Final = 60.0  # the longest Retry-After of a server that is obeyed

# --- calls -----------------------------------------------------------------------------------------------------
RPC_NAME_BYTES: Final = 32  # of the last part of a method's name
RPC_BODY_BYTES: Final = 1 << 20  # hard limit of any body; larger data is sent as frames
RPC_DEFAULT_BODY_BYTES: Final = 128 << 10  # limit of a method that declares no other
RPC_FRAMES: Final = 64  # frames of one message
RPC_MESSAGE_FRAME_BYTES: Final = 256 << 20  # payload of all frames of one message
RPC_ERROR_BYTES: Final = 4096  # an error is a sentence, not a document
RPC_ERROR_CHARS: Final = 512  # of an error's text as sent, so that it fits in any encoding
RPC_PENDING: Final = 1024  # calls waiting for one peer's service; more means that the peer is stuck
RPC_CALLS_PER_STREAM: Final = 1024  # concurrent calls of one peer on one stream
RPC_CALLS_PER_PEER: Final = 256  # default for one method
RPC_CALLS: Final = 2048  # default for one method, all peers together
RPC_DEADLINE_S: Final = 3600.0  # the longest deadline that a caller may set,
RPC_ROUND_DEADLINE_S: Final = 7 * 86_400.0  # or for an averaging round, which takes as long as slow connections need
RPC_OUTBOX_BYTES: Final = 256 << 10  # unsent replies above which we stop reading that peer's requests
RPC_PARTS_AHEAD: Final = 2  # parts of a streaming call that are read before the handler asks for them
RPC_RECEIVING_BYTES: Final = 1 << 30  # payload buffered for all peers together
RPC_RECEIVING_BYTES_PER_PEER: Final = 512 << 20  # of these, one peer: two full messages
ANSWER_BYTES: Final = 256 << 20  # unread answers and parts, all peers together
ANSWER_BYTES_PER_PEER: Final = 64 << 20  # of these, one peer: sixty-four parts of an average, 1 MiB each
UNPROVEN_PER_MINUTE: Final = 24_000  # calls with an invalid proof: checking their signatures takes some 2 s
CALLS_HOST: Final = 8192  # concurrent calls of all methods and peers
RPC_BUDGET_WAIT_S: Final = 2.0  # wait for memory; after that, the call is refused as overloaded
RPC_STEP_BYTES: Final = 1 << 20  # of payloads: memory is reserved this far ahead of the bytes received
RPC_LEAST_BYTES_PER_S: Final = 32 << 10  # a quarter of a 1 Mb/s line: slower senders occupy memory for too long
SLOW_LINE_BYTES_PER_S: Final = 125e3  # 1 Mb/s: the slowest transfer between peers that time limits allow for
SLOW_DISK_BYTES_PER_S: Final = 10e6  # a busy hard disk: the slowest write that time limits allow for
RPC_STALL_S: Final = 15.0  # beyond the time of a step at that rate: packet loss, a laptop that changes networks
RPC_MESSAGE_S: Final = 30.0  # the same for a message before its payloads, which its sender has ready
RPC_FREE_BODY_BYTES: Final = 4 << 10  # of a running call: this much is accounted with the call itself
RPC_FREE_STREAM_BYTES: Final = 16 << 10  # partial message, or unread answers, of a stream: accounted with the stream
RPC_LANES: Final = 128  # idle streams kept for large calls to one service of one peer: as many as a step starts with
LINE_RATE_PEERS: Final = 1024  # peers whose rate is remembered: twice LINKS
RPC_IDLE_S: Final = 120.0  # a shared stream that is unused for this long is closed

# --- state download --------------------------------------------------------------------------------------------
STATE_PIECE_BYTES: Final = 1 << 20  # part of the protocol: the unit that is verified and retransmitted
WORTH_A_FILE_BYTES: Final = 64 << 20  # copies, totals and residuals from this size on are in files, others in memory
STATE_PIECES: Final = FRAME_BYTES // 32  # their digests fit into one frame: states of up to 8 TiB
STATE_DONORS: Final = 8  # donors that a newcomer asks at once; each freezes a copy of its state for it
STATE_PIECES_PER_DONOR: Final = 8  # requests to one donor in flight, as many as there are idle lanes (RPC_LANES)
STATE_PIECES_IN_FLIGHT: Final = 32  # requests to all donors together: memory of a download beside the state itself
STATE_GIVEN_PER_PEER: Final = 16  # pieces being sent to one peer: twice what it requests, to cover cancelled calls
STATE_GIVEN: Final = 64  # pieces being sent to all peers together
STATE_MEETING: Final = 32  # callers that may wait for our next step: a third of the strangers that may ask at once
STATE_COPIES: Final = 2  # frozen copies that a donor keeps: the newest, and one that is still being fetched
STATE_TOTALS: Final = 64  # summed gradients of the last steps that a member keeps for peers that catch up
STATE_NAMED_COPIES: Final = 4  # totals, or kept checkpoints of one stage, hashed and ready to be fetched
KEPT_SETS: Final = 32  # sets of checkpoints that one keeper announces
STATE_TRAIL: Final = 256  # totals that a newcomer stores in a file until it has the state that they apply to
STATE_COPY_LIFE_S: Final = 1800.0  # the longest that a copy in use blocks a new one
STATE_LEAST_BYTES_PER_S: Final = 16 << 10  # a caller that fetches slower cannot block a new copy: half a slow line
STATE_USERS: Final = 512  # users of one copy whose progress is remembered: as many as there are connections

# --- experts ---------------------------------------------------------------------------------------------------
EXPERT_SIDE: Final = 1024  # places in one dimension of a grid: their generations and versions fit into one record
EXPERT_PLACES: Final = 1 << 30  # of all layers: every expert has a number
EXPERT_STATE_BYTES: Final = 8 << 30  # of one expert's checkpoint, moments included
EXPERT_PIECES: Final = EXPERT_STATE_BYTES >> 20  # of STATE_PIECE_BYTES
KEPT_EXPERTS_PER_RECORD: Final = 16  # pointers of some 400 bytes each: four such records fill a publisher's quota
KEPT_EXPERTS: Final = 4096  # checkpoints that one peer stores: as many as some dozens of hosts have experts
KEPT_RECORDS_PER_PREFIX: Final = 4  # of one publisher: what fits beside addresses into its quota of a key
EXPERT_TAKING: Final = 64  # experts that one peer is adopting
EXPERT_TOP_K: Final = 64  # experts per sample
EXPERT_LOOKUPS: Final = 4096  # prefixes that one round of a search looks up: 128 messages
EXPERT_PREFIXES_KEPT: Final = 1 << 14  # prefixes whose experts a caller caches, empty prefixes included
EXPERT_CLAIMS_KEPT: Final = 1 << 18  # claims in all these; some 100 bytes each
EXPERT_CLAIMS: Final = 4  # claims to one expert, the highest ones: one host serves, the others yield or lie
EXPERT_RESTS: Final = 4096  # hosts, or experts on a host, that failed and are not called for a while
EXPERTS_SEEN: Final = 1 << 16  # experts whose last version is remembered, to count lost updates
EXPERT_QUEUED_PER_CALLER: Final = 960  # requests queued at one host: 64 batches in flight, 15 of its experts each;
#   just below the concurrent calls that a peer may have there
EXPERT_QUEUED: Final = 4096  # of all callers together: their frames are accounted as bytes being received
EXPERT_KEPT_ANSWERS: Final = 65_536  # updates remembered so that a repeat does not count twice: some 200 bytes each
EXPERT_KEPT_BYTES: Final = 256 << 20  # of their answers; a repeat whose answer was evicted is recognized and refused
EXPERT_KEPT_S: Final = 120.0  # a caller that has not repeated a backward within this time has abandoned it

# --- microbatches that a stage peer stores -----------------------------------------------------------------------
HELD_BATCHES: Final = 4  # batches of microbatches for one step: one counts, others were started and dropped meanwhile
HELD_BATCHES_PER_TRAINER: Final = 2  # of these, one trainer
HELD_PADDING_BYTES: Final = 4096  # by which coded frames may be larger than their tensors
HELD_CONDUCTORS: Final = 4  # conductors whose grants count at one position: the current one, and those lost meanwhile
GRANTS_VERIFIED: Final = 1024  # grants whose signature was verified and need not be verified again

# --- steps: bounds of run files and swarms, so that every message about them fits --------------------------------
STAGES: Final = 1024  # of one pipeline: a microbatch's holders and receipts of all stages fit into one message
POSTS: Final = 2  # stages that one peer serves at once: orders to all of them and to a helper fit into its call limit
ATTEMPTS: Final = 1 << 48  # of one microbatch: one every 50 ms for longer than any run
BROKEN_CHARS: Final = 300  # of the reason why a microbatch's way ended: a sentence
JOINER_STAGES: Final = 8  # stages whose checkpoints a joining peer announces: more than it will have served
LAST_STEP: Final = (1 << 53) - 1  # the largest integer that is exact in every language's number type
MICROBATCHES: Final = 16_384  # of one step: as spans of numbers, in any order, 180 KiB at most
BATCH_TRAINERS: Final = 1024  # trainers in one batch; each name takes 56 bytes in every message about the batch
MEMBERS: Final = 4096  # of one run, helpers included: their names fit into an order to average
MEMBER_ADDRS: Final = 4  # of each member in the conductor's list: one or two of each kind; the directory has more
MEMBER_NEWS_BYTES: Final = 256 << 10  # of the list in one answer: the oldest changes first, the rest with later answers
REPORT_DONE_BYTES: Final = 256 << 10  # of finished microbatches in a trainer's report; the rest comes with the next
REPORTS_PER_S: Final = 100  # of one peer to a conductor that answers each at once; a few steps need hundreds,
REPORTS_AT_ONCE: Final = 200  # and such a burst is not delayed
REDO_AT_ONCE: Final = 4096  # repeats requested of one trainer in one answer: as many as it may have in flight
SAVED_TOLD: Final = 64  # positions that a member reports it can return to: the newest, and recalled ones
WAITS_CHARS: Final = 400  # of the text that says what a peer waits for

# --- progress ----------------------------------------------------------------------------------------------------
FORESEEABLE_S: Final = 86_400.0  # the longest forecast of a step's end; nothing later can be predicted

# --- averaging -------------------------------------------------------------------------------------------------
AVERAGE_PARTS: Final = 1 << 20  # of one round: some hundred bytes of bookkeeping each
AVERAGE_PART_BYTES: Final = 4 << 20  # of one part before it is coded: the most that a run file may set
LINE_PAIRS: Final = 64  # the slowest bandwidth-limited pairs of a swarm; each is a row of a linear program
LINE_PAIRS_GROUP: Final = 64  # members of the largest round that uses them: solved in well under a second
CALLED_TRAINERS: Final = 64  # trainers dialed by a stage peer that nobody can dial
LINE_BYTES_PER_S: Final = 125e9  # 1 Tb/s: higher reported rates are clipped to this
LINE_S_PER_BYTE: Final = 1e-3  # of a round's time over its vector's bytes: slower rounds are not paced
LINE_BYTES_PER_S_MIN: Final = 1e3  # too slow for any training; lower reported rates are raised to this

# --- the network between peers ---------------------------------------------------------------------------------
NETWORK_PEERS: Final = 256  # peers that one peer keeps measurements of: half of the links that it may have
NETWORK_REPORT_PAIRS: Final = 64  # pairs in one report: 6 KiB every half minute
NETWORK_FIGURES: Final = 1 << 16  # reported measurements of pairs that a conductor keeps: some 450 bytes each
NETWORK_PART_PAIRS: Final = 512  # pairs in one answer with a part of the conductor's map: 100 KiB at most
NETWORK_RTT_S: Final = 60.0  # a round trip; no link survives a longer one
NETWORK_AGE_S: Final = 86_400.0  # of a measurement; older ones are not reported

# --- transport: hand-shake and negotiation ---------------------------------------------------------------------
PROTOCOL_BYTES: Final = 256  # protocol names seen in libp2p are below 100 bytes
MULTISTREAM_LINE_BYTES: Final = 1024  # a line is a name and a newline; Go allows 64 KiB, which nobody needs
MULTISTREAM_ATTEMPTS: Final = 16  # proposals on one stream before it counts as noise
NOISE_HANDSHAKE_BYTES: Final = 4096  # one hand-shake message: keys, signature, extensions take about 200
NOISE_MUXERS: Final = 16  # muxers offered early
PROTOBUF_FIELDS: Final = 4096  # an identify message of a large Go host has a few hundred
AGENT_BYTES: Final = 256  # agent and protocol version text
IDENTIFY_BYTES: Final = 64 * 1024  # all parts of one identify message; Go sends up to 8 KiB and a signed record
IDENTIFY_ADDRS: Final = 64  # kept of one identify message before ADDRS_PER_PEER of them are chosen
IDENTIFY_PROTOCOLS: Final = 512  # kept of one identify message; a large Go host serves some dozens
IDENTIFY_PARTS: Final = 10  # Go splits the message and has the same limit

# --- transport: muxer and connections --------------------------------------------------------------------------
STREAMS_INBOUND: Final = 512  # opened by the peer and open at once on one connection; each may have 256 KiB unread
STREAMS_OUTBOUND: Final = 512  # opened by us and open at once on one connection: what a peerd peer accepts
STREAMS_HOST: Final = 16_384  # open at once, by all peers: 32 for each possible connection
STREAM_ACK_BACKLOG: Final = 256  # streams opened by us and not yet acknowledged; Go accepts 256
STREAMS_EARLY: Final = 10  # opened by us before the peer uses any stream; js-yamux 3 closes a connection with 11
WINDOW_BYTES_INITIAL: Final = 256 * 1024  # yamux: what each stream may send without a window update
WINDOW_BYTES_MAX: Final = 64 << 20  # one stream: 500 Mb/s x 300 ms, and what arrives while one connection stalls
WINDOW_BYTES_LINK: Final = 96 << 20  # beyond the initial windows, all streams of one connection
WINDOW_BYTES_HOST: Final = 512 << 20  # beyond the initial windows, all connections together
UNREAD_BYTES_LINK: Final = 16 << 20  # within the initial windows, received and unread: 64 streams with idle readers
UNREAD_BYTES_HOST: Final = 128 << 20  # the same, all connections together
UNREAD_LOOK_BYTES: Final = 512 << 10  # received on one connection between two counts; a count takes microseconds
CONTROL_BYTES_PENDING: Final = 64 * 1024  # muxer replies queued for a peer that sends requests and does not read
RAILS_PER_LINK: Final = 12  # further connections of one link: on Linux, each usually has some 3 MB in flight
RAILS: Final = 128  # of all links; with the links themselves below the usual 1024 open files. One peer, or place, gets
#   at most as many as remain free: half of them if it is alone, so that later peers get some.
HELD_PIECES: Final = 8192  # of one striped stream, out of order: a full window in the smallest useful pieces
HELD_PIECE_BYTES: Final = 256  # overhead of one such piece; all of them take a quarter of the window
RINGED_RESETS: Final = 256  # reset streams that are still in the send queue: beyond this, they are removed
LINKS: Final = 512  # connections in total; half the usual limit on open files
LINKS_INBOUND: Final = 384  # leaves room for outbound connections
LINKS_PER_PEER: Final = 4  # simultaneous dials and a reconnect leave two or three for a moment
HALF_OPEN: Final = 64  # inbound connections inside their hand-shake
PEERS_KNOWN: Final = 8192  # address book; the oldest entry is evicted
WATCH_EVENTS: Final = 4096  # unread PeerUp, PeerTold and PeerDown events of one watcher

# --- reachability ----------------------------------------------------------------------------------------------
AUTONAT_BYTES: Final = 4096  # one message: 16 addresses and a sentence; the same limit as in Go
AUTONAT_DIALS: Final = 4  # addresses tried for one request, all at the requester's own IP address
AUTONAT_AT_ONCE: Final = 16  # concurrent requests: each takes one dial or a few, for some seconds
AUTONAT_AT_ONCE_PER_IP: Final = 3  # or IPv6 /64, so that no host occupies all slots
AUTONAT_PER_MINUTE: Final = 240  # requests that are answered
AUTONAT_PER_MINUTE_PER_IP: Final = 24  # or IPv6 /64: several peers may share a router
AUTONAT_PER_MINUTE_PER_PEER: Final = 6  # a peer asks again when its addresses change
OBSERVERS: Final = 256  # peers whose view of our addresses is kept; half of LINKS
RESERVATION_ADDRS: Final = 3  # addresses of one relay that we announce circuits over

# --- circuits over relays --------------------------------------------------------------------------------------
CIRCUIT_MESSAGE_BYTES: Final = 4096  # one message of hop or stop; the same limit as in Go
CIRCUIT_ANSWER_S: Final = 15.0  # for a relay's answer, which waits for the far peer
CIRCUIT_REQUEST_S: Final = 10.0  # for a stranger's request, and for the far peer's answer to the relay
CIRCUITS_HALF_OPEN: Final = 32  # incoming circuits inside their hand-shake, half of them over one relay
RESERVATION_S: Final = 86_400.0  # a relay's longer promise is cut to this

# --- hole punching -----------------------------------------------------------------------------------------------
PUNCH_MESSAGE_BYTES: Final = 4096  # as the specification says
PUNCH_ADDRS: Final = 4  # dialed of the addresses that a peer sends: two families, at home and outside
PUNCH_ATTEMPTS: Final = 3  # of one meeting, as the specification says
PUNCH_ATTEMPT_S: Final = 5.0  # for one of them, as in Go
PUNCH_MEETINGS: Final = 32  # concurrent, with all peers
PUNCH_PAIRS: Final = 1024  # failed pairs that are remembered: twice LINKS
PUNCH_PER_MINUTE: Final = 360  # addresses dialed at the request of all peers: too few to scan networks through us
PUNCH_PER_PEER_MINUTE: Final = 24  # of these, one peer: two meetings with all their attempts
PUNCH_TARGET_PER_MINUTE: Final = 30  # attempts at one host or IPv6 /64, from all requests: no host is flooded

# --- dials of addresses learned from others ----------------------------------------------------------------------
HEARSAY_PER_MINUTE: Final = 480  # dials of addresses learned from others: a full table is refreshed in some minutes
HEARSAY_TARGET_PER_MINUTE: Final = 30  # of these, to one host or IPv6 /64 that has not answered as the right peer

# --- records and the DHT ---------------------------------------------------------------------------------------
RECORD_VALUE_BYTES: Final = 16 << 10  # an announcement with addresses and figures takes well below 1 KiB
RECORD_SUFFIX_BYTES: Final = 64  # a short name or a hash
RECORD_TTL_S: Final = 3600.0  # a lease: live publishers renew it, and all other records expire within the hour
CLOCK_TOLERANCE_S: Final = 3.0  # the most that two corrected clocks may differ before records are refused
CLOCK_CORRECTION_S: Final = 86_400.0  # a wrong time zone is hours; a larger error is a broken clock or a lie
DHT_KEYS_PER_CALL: Final = 32  # keys in one request
DHT_CONTACTS_PER_REPLY: Final = 64  # peers in one reply
DHT_RECORDS_PER_KEY: Final = 512  # sub-keys under one key
DHT_BYTES_PER_KEY: Final = 256 << 10  # so that a key's records fit into one reply
DHT_LARGE_BYTES: Final = 1 << 20  # cache of large records found by reads, so that they need not be sent again
DHT_TAGS_PER_CALL: Final = 256  # tags of records that the caller already has
RECORD_TAG_BYTES: Final = 16  # of such a tag, a hash without collisions
DIRECTORY_READ_BYTES: Final = 64 << 10  # of a key in each read of a run's directory: a hundred announcements and more
COUNTED_PEERS: Final = 4096  # whose work a conductor counts; those with the least are dropped first
COUNTED_ROWS: Final = 96  # of one page of these counts: 6 KiB, a small part of a directory read
COUNTED_PAGES: Final = 5  # of one conductor: what fits into a publisher's quota of a key
DHT_ANSWERS_KEPT: Final = 4  # of one key, as a multiple of the largest answer: some answers agree, others add records
DHT_RECORDS_PER_STORE: Final = 64  # records in one message
DHT_STORE_BYTES: Final = 256 << 10  # all records of one such message
DHT_STORED_RECORDS: Final = 1 << 16  # stored for others, all keys together
DHT_STORED_BYTES: Final = 64 << 20  # of these, in memory
DHT_COPIED_KEYS: Final = 1024  # popular keys of other peers of which copies are stored here
DHT_COPIED_BYTES: Final = 8 << 20  # of these, in memory
DHT_RECORDS_PER_PUBLISHER: Final = 1024  # stored for one publisher, all keys together
DHT_BYTES_PER_PUBLISHER: Final = 1 << 20  # the same in bytes
DHT_BYTES_PER_KEY_AND_PUBLISHER: Final = 32 << 10  # each record costs 256 bytes extra: 64 records of 256 bytes
DHT_SUFFIXES_PER_KEY: Final = 64  # sub-keys of one publisher under one key

# --- run files ------------------------------------------------------------------------------------------------------
PLAN_BYTES: Final = 48 << 10  # of a run file's plan: some seven hundred peers
RUN_FILE_BYTES: Final = 64 << 10  # the part that all peers share; ours take about two thousand

# --- access to a run -------------------------------------------------------------------------------------------
TOKEN_BYTES: Final = 1024  # signature, names and roles take about 250
TOKEN_NAME_CHARS: Final = 64  # a person's or a team's name
TOKEN_ROLES: Final = 16  # roles in one token
REVOKED_TOKENS: Final = 1024  # revoked and not yet expired; the list must fit into one record
REVOKED_BYTES: Final = 12 << 10  # the signed list: ten bytes per token
ACCESS_MET: Final = 1024  # peers remembered to have exchanged tokens with us: twice LINKS
ACCESS_TOLD: Final = 20  # log lines per minute about callers without a token

# --- conducting ------------------------------------------------------------------------------------------------
GRANTED_TRAINERS: Final = 1024  # trainers whose signed grants are cached, current and early: twice LINKS
ESTABLISHED_MEMBERS: Final = 4096  # of one stage, remembered as part of the run: as many as it may have
ESTABLISHED_STEPS: Final = 256  # without a commit of a member, after which its statement is no longer required
SEEN_POSITIONS: Final = 64  # the newest positions of the swarm that a peer remembers
REMEMBERED_POSITIONS: Final = 4096  # the same for a conductor: some 200 bytes each
COMMIT_PROOFS: Final = 8  # proofs of positions that a peer stores: of the newest checkpoints
RECEIPTS_LOOKED_AT: Final = 16  # verified per trainer if a member denies many: 2 ms
PROBATION_PLACES: Final = 4096  # places with newcomers on probation; the oldest is evicted
PROBATION_PEERS: Final = 4096  # newcomers on probation; the oldest is evicted
LEASHED_TRAINERS: Final = 1024  # remembered for microbatches that they did not finish, connected or not: twice LINKS
TERM_JUMP: Final = 1024  # the most that a believed term exceeds ours: more conductors than one absence can bring
TERM_FIRST: Final = 1 << 32  # of the first term that a peer learns: far more conductors than any run has
TERM_MAX: Final = (1 << 53) - 1  # the greatest that the wire format allows
LOOKED_AT_ONCE: Final = 16  # peers that a conductor asks concurrently, for rival conductors and for reachability
LOOKED_AT_PEERS: Final = 64  # that it asks in one round, connected peers first
SUSPECTS: Final = 1024  # peers and positions whose failures or requests are remembered: twice LINKS
