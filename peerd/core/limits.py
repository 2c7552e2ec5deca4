"""Every bound on what a peer may make us hold or do, in one place, each with its reason."""

from __future__ import annotations

from typing import Final

# --- addresses -------------------------------------------------------------------------------------------------
ADDRS_PER_PEER: Final = 16  # more addresses than a peer with several networks and relays needs
ADDR_BYTES: Final = 512  # a circuit address with two peer ids takes about 130
LAN_NAMES: Final = 64  # found in the local network and not yet looked at; a home has a few machines
LAN_TEXT_BYTES: Final = 4096  # read of what one of them says of itself: sixteen addresses of 255 bytes
LAN_PEERS: Final = 64  # neighbours that are remembered
LAN_DIALS: Final = 4  # to neighbours, at once

# --- faults of ours ---------------------------------------------------------------------------------------------
FAULT_PLACES: Final = 64  # lines of code that are counted by themselves; a healthy program has none
FAULT_CHARS: Final = 300  # kept of what an error says: a peer may have written parts of it

# --- tensor frames ---------------------------------------------------------------------------------------------
FRAME_DIMS: Final = 8  # more axes than any tensor that a model sends
FRAME_ELEMENTS: Final = 1 << 31  # of one tensor; keeps every product far from overflow in foreign code
FRAME_BYTES: Final = 256 << 20  # one tensor, coded or not: 8 x 2048 x 4096 activations in fp32

# --- text fetched over http(s) -----------------------------------------------------------------------------------
INDEX_BYTES: Final = 32 << 20  # a list of files takes about 150 bytes for each
INDEX_FILES: Final = 200_000  # as many as a list of that size can name
INDEX_NAME_CHARS: Final = 512  # of a path below the address; file systems allow 255 for each of its parts
DATA_FILE_BYTES: Final = 8 << 30  # one file, which the cache must hold whole
HTTP_REDIRECTS: Final = 5  # a mirror, a region, a signed address; more is a circle
HTTP_PAUSE_S: Final = 60.0  # longest that a server may ask us to wait

# --- calls -----------------------------------------------------------------------------------------------------
RPC_NAME_BYTES: Final = 32  # of a method's last word
RPC_BODY_BYTES: Final = 1 << 20  # wall for any body; larger things travel as frames
RPC_DEFAULT_BODY_BYTES: Final = 128 << 10  # what a method takes unless it says otherwise
RPC_FRAMES: Final = 64  # frames of one message
RPC_MESSAGE_FRAME_BYTES: Final = 256 << 20  # payload of all frames of one message
RPC_ERROR_BYTES: Final = 4096  # an error is a sentence, not a document
RPC_ERROR_CHARS: Final = 512  # what we send of a reason, so that it fits in any encoding
RPC_PENDING: Final = 1024  # calls that wait for one peer's service; more means the peer is stuck
RPC_CALLS_PER_STREAM: Final = 1024  # calls of one peer that run at once on one stream
RPC_CALLS_PER_PEER: Final = 256  # default for one method
RPC_CALLS: Final = 2048  # default for one method, all peers together
RPC_DEADLINE_S: Final = 3600.0  # longest time that a caller may ask us to work,
RPC_ROUND_DEADLINE_S: Final = 7 * 86_400.0  # or to take part in an averaging round, which takes as long as lines need
RPC_OUTBOX_BYTES: Final = 256 << 10  # unsent replies above which we stop reading that peer's requests
RPC_PARTS_AHEAD: Final = 2  # parts of a streaming call read before someone wants them
RPC_RECEIVING_BYTES: Final = 1 << 30  # payload that all peers together may have us hold
RPC_RECEIVING_BYTES_PER_PEER: Final = 512 << 20  # of these, one peer: two whole messages
ANSWER_BYTES: Final = 256 << 20  # answers and parts that nobody has read yet, all peers together
ANSWER_BYTES_PER_PEER: Final = 64 << 20  # of these, one peer: sixty-four parts of an average of a megabyte each
UNPROVEN_PER_MINUTE: Final = 24_000  # calls with a proof that does not hold: some 2 s of looking at signatures
CALLS_HOST: Final = 8192  # that run at once, of all methods and peers
RPC_BUDGET_WAIT_S: Final = 2.0  # then it is honest to say that we are overloaded
RPC_STEP_BYTES: Final = 1 << 20  # of payloads: room is taken so far ahead of the bytes that come
RPC_LEAST_BYTES_PER_S: Final = 32 << 10  # a quarter of a modem's line of 1 Mb/s: slower senders hold room in vain
SLOW_LINE_BYTES_PER_S: Final = 125e3  # 1 Mb/s: a transfer between peers is given the time that it takes on such a line
SLOW_DISK_BYTES_PER_S: Final = 10e6  # a busy hard disk: a write is given the time that it takes on such a disk
RPC_STALL_S: Final = 15.0  # beyond what a step takes at that rate: lost packets, a laptop that changes its network
RPC_MESSAGE_S: Final = 30.0  # likewise for a message before its payloads, which its sender has whole
RPC_FREE_BODY_BYTES: Final = 4 << 10  # of a call under way: that much is counted with the call
RPC_FREE_STREAM_BYTES: Final = 16 << 10  # half a message, or unread answers, of one stream: counted with the stream
RPC_LANES: Final = 128  # idle streams kept for large calls to one service of one peer: as many as a step begins with
LINE_RATE_PEERS: Final = 1024  # peers whose rate is remembered: twice the connections that we hold
RPC_IDLE_S: Final = 120.0  # a shared stream that nobody used for so long is closed

# --- state download --------------------------------------------------------------------------------------------
STATE_PIECE_BYTES: Final = 1 << 20  # part of the protocol: what is checked, and sent again, by itself
WORTH_A_FILE_BYTES: Final = 64 << 20  # copies, totals and residuals of that size lie in files, smaller ones in memory
STATE_PIECES: Final = FRAME_BYTES // 32  # their digests travel as one frame: states of up to 8 TiB
STATE_DONORS: Final = 8  # donors that a newcomer asks at once; each freezes a copy of its state for it
STATE_PIECES_PER_DONOR: Final = 8  # asked of one donor at once, as many as there are idle lanes (RPC_LANES)
STATE_PIECES_IN_FLIGHT: Final = 32  # asked of all donors together: what a download holds beside the state itself
STATE_GIVEN_PER_PEER: Final = 16  # pieces on their way to one peer; twice what it asks for, for calls just called off
STATE_GIVEN: Final = 64  # pieces on their way to all peers together
STATE_MEETING: Final = 32  # callers that may wait for a step of ours: a third of the strangers that may ask at once
STATE_COPIES: Final = 2  # frozen copies that a donor keeps: the newest, and one that somebody is still fetching
STATE_TOTALS: Final = 64  # summed gradients of the last steps that a member keeps for peers that catch up
STATE_NAMED_COPIES: Final = 4  # totals, or kept checkpoints of one stage, hashed and ready to be fetched
KEPT_SETS: Final = 32  # sets of checkpoints that one keeper announces
STATE_TRAIL: Final = 256  # totals that a newcomer holds, in a file, until the state comes that they lead on from
STATE_COPY_LIFE_S: Final = 1800.0  # the longest that a copy in use stands in the way of a new one
STATE_LEAST_BYTES_PER_S: Final = 16 << 10  # a caller that fetches slower keeps no copy from others: half a slow line
STATE_USERS: Final = 512  # of one copy, whose progress is remembered: as many as there are connections

# --- experts ---------------------------------------------------------------------------------------------------
EXPERT_SIDE: Final = 1024  # places in one dimension of a grid: their generations and versions fit into one record
EXPERT_PLACES: Final = 1 << 30  # of all layers: every expert has a number
EXPERT_STATE_BYTES: Final = 8 << 30  # of one expert's checkpoint, moments included
EXPERT_PIECES: Final = EXPERT_STATE_BYTES >> 20  # of STATE_PIECE_BYTES
KEPT_EXPERTS_PER_RECORD: Final = 16  # pointers of some 400 bytes each: four such records fill a publisher's share
KEPT_EXPERTS: Final = 4096  # checkpoints that one peer holds: as many as some dozens of hosts have experts
KEPT_RECORDS_PER_PREFIX: Final = 4  # of one publisher: what fits beside addresses into its share of a key
EXPERT_TAKING: Final = 64  # experts that one peer is about to adopt
EXPERT_TOP_K: Final = 64  # experts of one sample
EXPERT_LOOKUPS: Final = 4096  # prefixes that one round of a search asks for: 128 messages
EXPERT_PREFIXES_KEPT: Final = 1 << 14  # prefixes whose experts a caller remembers, with those below which nothing lives
EXPERT_CLAIMS_KEPT: Final = 1 << 18  # claims in all these; some 100 bytes each
EXPERT_CLAIMS: Final = 4  # of hosts to one expert, the highest: one serves, others yield or lie
EXPERT_RESTS: Final = 4096  # hosts, or experts on a host, that failed and are left alone for a while
EXPERTS_SEEN: Final = 1 << 16  # experts whose last version is remembered, to count updates that were lost
EXPERT_QUEUED_PER_CALLER: Final = 960  # requests that wait at one host: just below the calls that a peer may have
#   running there; 64 batches in flight, 15 of its experts each
EXPERT_QUEUED: Final = 4096  # of all callers together: their frames are counted as bytes being received
EXPERT_KEPT_ANSWERS: Final = 65_536  # updates remembered so that a repeat does not count twice: some 200 bytes each
EXPERT_KEPT_BYTES: Final = 256 << 20  # of their answers; one whose bytes are gone is still known, and refused
EXPERT_KEPT_S: Final = 120.0  # a caller that has not repeated a backward by then has given it up

# --- what a stage peer keeps of microbatches ---------------------------------------------------------------------
HELD_BATCHES: Final = 4  # worth of microbatches for one step: one is counted, others were begun and dropped meanwhile
HELD_BATCHES_PER_TRAINER: Final = 2  # of these, one trainer
HELD_PADDING_BYTES: Final = 4096  # by which coded frames may be larger than the tensors in them
HELD_CONDUCTORS: Final = 4  # conductors whose admissions count at one position: this one, and those lost meanwhile
GRANTS_VERIFIED: Final = 1024  # admissions whose signature was looked at and need not be again

# --- steps: what a run file and a swarm may ask for, so that every message about them can be sent ----------------
STAGES: Final = 1024  # of one pipeline: a microbatch's holders and receipts, stage by stage, are told in one piece
POSTS: Final = 2  # stages that one peer serves at once: orders to all and to a helper fit into what one peer may call
ATTEMPTS: Final = 1 << 48  # of one microbatch: one every 50 ms for longer than any run
BROKEN_CHARS: Final = 300  # of the reason that a microbatch's way ended: a sentence
JOINER_STAGES: Final = 8  # stages whose checkpoints a peer that joins tells of: more than it will have served
LAST_STEP: Final = (1 << 53) - 1  # that every language can count to, in any number it has
MICROBATCHES: Final = 16_384  # of one step: as spans of numbers, in any order, 180 KiB at most
BATCH_TRAINERS: Final = 1024  # trainers in one batch; each name takes 56 bytes wherever the batch is told
MEMBERS: Final = 4096  # of one run, helpers counted: their names fit into an order to average
MEMBER_ADDRS: Final = 4  # of each in the conductor's list: one of each kind, or two; the directory has more
MEMBER_NEWS_BYTES: Final = 256 << 10  # of the list in one answer: what changed first, the rest with the next answers
REPORT_DONE_BYTES: Final = 256 << 10  # of what a trainer has done, in one report; the rest comes with the next
REPORTS_PER_S: Final = 100  # of one peer to its conductor, when that answers each at once; a few steps make hundreds,
REPORTS_AT_ONCE: Final = 200  # and such a burst does not wait
REDO_AT_ONCE: Final = 4096  # repeats that one trainer is told of in one answer: as many as it may have in flight
SAVED_TOLD: Final = 64  # positions that a member tells the conductor it can return to: the newest, and recalled ones
WAITS_CHARS: Final = 400  # of what somebody waits for

# --- progress ----------------------------------------------------------------------------------------------------
FORESEEABLE_S: Final = 86_400.0  # how far ahead a step's end is foretold: what is farther off, nobody can know

# --- averaging -------------------------------------------------------------------------------------------------
AVERAGE_PARTS: Final = 1 << 20  # of one round: some hundred bytes of bookkeeping each
AVERAGE_PART_BYTES: Final = 4 << 20  # of one part, before it is coded: what a run file may ask for
LINE_PAIRS: Final = 64  # limited pairs of a swarm that count, the narrowest; a linear programme has a row for each
LINE_PAIRS_GROUP: Final = 64  # members of a round in which they count: the programme is solved in well under a second
CALLED_TRAINERS: Final = 64  # trainers dialed by a stage peer that nobody can dial
LINE_BYTES_PER_S: Final = 125e9  # 1 Tb/s: what anyone says beyond is taken as this
LINE_S_PER_BYTE: Final = 1e-3  # of a round, over its vector: slower ones are not sent evenly
LINE_BYTES_PER_S_MIN: Final = 1e3  # a line that trains nothing; what anyone says below is taken as this

# --- the network between peers ---------------------------------------------------------------------------------
NETWORK_PEERS: Final = 256  # peers that one peer keeps figures of: more than half of the links that it may hold
NETWORK_REPORT_PAIRS: Final = 64  # pairs in one report: 6 KiB every half minute
NETWORK_FIGURES: Final = 1 << 16  # told figures of pairs that a conductor keeps: some 450 bytes each
NETWORK_PART_PAIRS: Final = 512  # pairs in one answer with a part of the conductor's map: 100 KiB at most
NETWORK_RTT_S: Final = 60.0  # a round trip; no link lives that answers later
NETWORK_AGE_S: Final = 86_400.0  # of a figure; older ones are not told

# --- transport: hand-shake and negotiation ---------------------------------------------------------------------
PROTOCOL_BYTES: Final = 256  # protocol names seen in libp2p are below 100 bytes
MULTISTREAM_LINE_BYTES: Final = 1024  # a line is a name and a newline; Go allows 64 KiB, nobody needs it
MULTISTREAM_ATTEMPTS: Final = 16  # proposals on one stream before it counts as noise
NOISE_HANDSHAKE_BYTES: Final = 4096  # one hand-shake message: keys, signature, extensions take about 200
NOISE_MUXERS: Final = 16  # muxers offered early
PROTOBUF_FIELDS: Final = 4096  # an identify message of a large Go host has a few hundred
AGENT_BYTES: Final = 256  # agent and protocol version text
IDENTIFY_BYTES: Final = 64 * 1024  # all parts of one identify message; Go sends up to 8 KiB and a signed record
IDENTIFY_ADDRS: Final = 64  # kept of one identify message before ADDRS_PER_PEER picks
IDENTIFY_PROTOCOLS: Final = 512  # kept of one identify message; a large Go host serves some dozens
IDENTIFY_PARTS: Final = 10  # Go splits the message; the same bound as there

# --- transport: muxer and connections --------------------------------------------------------------------------
STREAMS_INBOUND: Final = 512  # open at once on one connection, by the peer; each may hold 256 KiB unread
STREAMS_OUTBOUND: Final = 512  # open at once on one connection, by us: what a peerd peer accepts
STREAMS_HOST: Final = 16_384  # open at once, by all peers: 32 for each connection that we may hold
STREAM_ACK_BACKLOG: Final = 256  # streams opened by us and not yet acknowledged; Go accepts 256
STREAMS_EARLY: Final = 10  # opened by us before the peer uses any stream; js-yamux 3 gives up a connection with 11
WINDOW_BYTES_INITIAL: Final = 256 * 1024  # yamux: what each stream may send unasked
WINDOW_BYTES_MAX: Final = 64 << 20  # one stream: 500 Mb/s x 300 ms, and what comes while one of its connections rests
WINDOW_BYTES_LINK: Final = 96 << 20  # beyond the initial windows, all streams of one connection
WINDOW_BYTES_HOST: Final = 512 << 20  # beyond the initial windows, all connections together
UNREAD_BYTES_LINK: Final = 16 << 20  # within the initial windows, received and unread: 64 streams whose readers rest
UNREAD_BYTES_HOST: Final = 128 << 20  # likewise, all connections together
UNREAD_LOOK_BYTES: Final = 512 << 10  # received on one connection between two counts: a count takes microseconds
CONTROL_BYTES_PENDING: Final = 64 * 1024  # muxer answers waiting for a peer that asks and does not read
RAILS_PER_LINK: Final = 12  # further connections of one link: on Linux some 3 MB are under way on each, usually
RAILS: Final = 128  # of all links; with the links themselves below the usual 1024 open files. One peer, or place, has
#   no more of them than are left: half of them when it is alone, and whoever comes later finds some.
HELD_PIECES: Final = 8192  # of one striped stream, ahead of their turn: a whole window in the smallest useful pieces
HELD_PIECE_BYTES: Final = 256  # what one such piece takes beside its data; all of them a quarter of the window
RINGED_RESETS: Final = 256  # streams that were reset and still wait for their turn to be sent: then they are swept out
LINKS: Final = 512  # connections in all; half the usual limit on open files
LINKS_INBOUND: Final = 384  # leaves room for those we want
LINKS_PER_PEER: Final = 4  # simultaneous dials and a reconnect leave two or three for a moment
HALF_OPEN: Final = 64  # inbound connections inside their hand-shake
PEERS_KNOWN: Final = 8192  # address book; the oldest entry makes room
WATCH_EVENTS: Final = 4096  # PeerUp, PeerTold and PeerDown that one watcher may leave unread

# --- reachability ----------------------------------------------------------------------------------------------
AUTONAT_BYTES: Final = 4096  # one message: 16 addresses and a sentence; the same bound as in Go
AUTONAT_DIALS: Final = 4  # addresses tried for one question, all at the asker's own IP address
AUTONAT_AT_ONCE: Final = 16  # questions under way: each is a dial, or a few, for some seconds
AUTONAT_AT_ONCE_PER_IP: Final = 3  # or IPv6 /64, so that none takes all places
AUTONAT_PER_MINUTE: Final = 240  # questions that are answered
AUTONAT_PER_MINUTE_PER_IP: Final = 24  # or IPv6 /64: several peers may share a router
AUTONAT_PER_MINUTE_PER_PEER: Final = 6  # it asks again when something changed
OBSERVERS: Final = 256  # peers whose view of our addresses is kept; half the connections that we hold
RESERVATION_ADDRS: Final = 3  # addresses of one relay that we announce ways over

# --- circuits over relays --------------------------------------------------------------------------------------
CIRCUIT_MESSAGE_BYTES: Final = 4096  # one message of hop or stop; the same bound as in Go
CIRCUIT_ANSWER_S: Final = 15.0  # for a relay's answer, which waits for the peer beyond it
CIRCUIT_REQUEST_S: Final = 10.0  # for what a stranger wants of us, and for the far peer's answer to the relay
CIRCUITS_HALF_OPEN: Final = 32  # incoming circuits inside their hand-shake, half of them over one relay
RESERVATION_S: Final = 86_400.0  # no relay's promise is believed for longer

# --- hole punching -----------------------------------------------------------------------------------------------
PUNCH_MESSAGE_BYTES: Final = 4096  # as the specification says
PUNCH_ADDRS: Final = 4  # dialed of those that a peer names: two families, at home and outside
PUNCH_ATTEMPTS: Final = 3  # of one meeting, as the specification says
PUNCH_ATTEMPT_S: Final = 5.0  # for one of them, as in Go
PUNCH_MEETINGS: Final = 32  # at once, with all peers
PUNCH_PAIRS: Final = 1024  # failed pairs that are remembered: twice the connections that we hold
PUNCH_PER_MINUTE: Final = 360  # addresses that all peers together may have us dial: nobody scans networks through us
PUNCH_PER_PEER_MINUTE: Final = 24  # of these, one peer: two meetings with all that they may take
PUNCH_TARGET_PER_MINUTE: Final = 30  # attempts at one host or IPv6 /64, whoever names it: nobody is bothered

# --- dials for others ------------------------------------------------------------------------------------------------
HEARSAY_PER_MINUTE: Final = 480  # dials of addresses that we only heard of: a full table refreshed in some minutes
HEARSAY_TARGET_PER_MINUTE: Final = 30  # of these, to one host or IPv6 /64 that has not answered as the right peer

# --- records and the DHT ---------------------------------------------------------------------------------------
RECORD_VALUE_BYTES: Final = 16 << 10  # an announcement with addresses and figures takes well below 1 KiB
RECORD_SUFFIX_BYTES: Final = 64  # a short name or a hash
RECORD_TTL_S: Final = 3600.0  # a lease; who stays renews it, and whatever else remains is gone within the hour
CLOCK_TOLERANCE_S: Final = 3.0  # how far two corrected clocks may differ before records are refused
CLOCK_CORRECTION_S: Final = 86_400.0  # a wrong time zone is hours; what is off by more is broken, or lied about
DHT_KEYS_PER_CALL: Final = 32  # keys that one message may ask for
DHT_CONTACTS_PER_REPLY: Final = 64  # peers that one reply may name
DHT_RECORDS_PER_KEY: Final = 512  # sub-keys under one key
DHT_BYTES_PER_KEY: Final = 256 << 10  # so that a key's records fit into one reply
DHT_LARGE_BYTES: Final = 1 << 20  # of large records that readings found, so that they need not be sent again
DHT_TAGS_PER_CALL: Final = 256  # names of records that an asker has already
RECORD_TAG_BYTES: Final = 16  # of such a name, which nobody can give to two records
DIRECTORY_READ_BYTES: Final = 64 << 10  # that each look at a run takes of a key: a hundred announcements and more
COUNTED_PEERS: Final = 4096  # whose work a conductor counts; those with the least are dropped first
COUNTED_ROWS: Final = 96  # of one page of these counts: 6 KiB, a small part of what a reader takes of a key
COUNTED_PAGES: Final = 5  # of one conductor: what fits into a publisher's share of a key
DHT_ANSWERS_KEPT: Final = 4  # of one key, as many times what one answer may hold: some that agree, and what each adds
DHT_RECORDS_PER_STORE: Final = 64  # records that one message may bring
DHT_STORE_BYTES: Final = 256 << 10  # the records of one such message, together
DHT_STORED_RECORDS: Final = 1 << 16  # held for others, all keys together
DHT_STORED_BYTES: Final = 64 << 20  # of these, in memory
DHT_COPIED_KEYS: Final = 1024  # held by others, and asked for here often
DHT_COPIED_BYTES: Final = 8 << 20  # of these, in memory
DHT_RECORDS_PER_PUBLISHER: Final = 1024  # held for one publisher, all keys together
DHT_BYTES_PER_PUBLISHER: Final = 1 << 20  # likewise
DHT_BYTES_PER_KEY_AND_PUBLISHER: Final = 32 << 10  # 256 bytes a record on top: 64 of a quarter KiB
DHT_SUFFIXES_PER_KEY: Final = 64  # sub-keys of one publisher under one key

# --- run files ------------------------------------------------------------------------------------------------------
PLAN_BYTES: Final = 48 << 10  # of a run file, for its plan: some seven hundred peers
RUN_FILE_BYTES: Final = 64 << 10  # the part that all peers share; ours take about two thousand

# --- access to a run -------------------------------------------------------------------------------------------
TOKEN_BYTES: Final = 1024  # signature, names and roles take about 250
TOKEN_NAME_CHARS: Final = 64  # a person's or a team's name
TOKEN_ROLES: Final = 16  # roles that one token may name
REVOKED_TOKENS: Final = 1024  # taken back and not yet expired; a list must fit into one record
REVOKED_BYTES: Final = 12 << 10  # the signed list: ten bytes for each
ACCESS_MET: Final = 1024  # peers remembered to have exchanged tokens with us: twice the connections that we hold
ACCESS_TOLD: Final = 20  # lines a minute in the log about callers without a token

# --- conducting ------------------------------------------------------------------------------------------------
GRANTED_TRAINERS: Final = 1024  # trainers' grants, due and early, that are not signed anew: twice LINKS
ESTABLISHED_MEMBERS: Final = 4096  # of one stage, remembered as part of the run: as many as it may have
ESTABLISHED_STEPS: Final = 256  # for which a member that takes part in no commit is still asked for its word
SEEN_POSITIONS: Final = 64  # the newest that a peer remembers to have been the swarm's
REMEMBERED_POSITIONS: Final = 4096  # likewise, of a conductor: some 200 bytes each
COMMIT_PROOFS: Final = 8  # proofs of positions that a peer holds: of the newest checkpoints
RECEIPTS_LOOKED_AT: Final = 16  # of one trainer's, when a member denies many: two thousandths of a second
PROBATION_PLACES: Final = 4096  # places whose newcomers were let go; the oldest makes room
PROBATION_PEERS: Final = 4096  # newcomers that were let go, likewise
LEASHED_TRAINERS: Final = 1024  # that are remembered for what they did not finish, here or gone: twice LINKS
TERM_JUMP: Final = 1024  # how far above ours a term may be: so many conductors in the time that one is away
TERM_FIRST: Final = 1 << 32  # of the first that one hears of: far more conductors than any run has
TERM_MAX: Final = (1 << 53) - 1  # the greatest that the wire carries
LOOKED_AT_ONCE: Final = 16  # peers that a conductor asks side by side whether they conduct, or can be reached
LOOKED_AT_PEERS: Final = 64  # that it asks in one look, those it is connected to first
SUSPECTS: Final = 1024  # peers of stage 0 that are remembered as not to be reached: twice LINKS
