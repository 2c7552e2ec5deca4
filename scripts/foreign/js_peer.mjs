// A js-libp2p peer under remote control: one JSON command a line on stdin, one JSON answer a line on stdout.
// Commands are described in tests/worlds/processes/foreign.py. It ends when stdin ends, so it cannot outlive its parent.
// Arguments: "relay" serves as a circuit relay; "circuits" dials over relays; "behind=<address of a relay>" also has
// a reservation there, and no other address than "listen=<address>"; "dcutr" upgrades what comes over a relay.
import { createHash, randomBytes } from 'node:crypto'
import { createInterface } from 'node:readline'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { circuitRelayServer, circuitRelayTransport } from '@libp2p/circuit-relay-v2'
import { dcutr } from '@libp2p/dcutr'
import { identify } from '@libp2p/identify'
import { ping } from '@libp2p/ping'
import { tcp } from '@libp2p/tcp'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'

const ECHO = '/peerd-test/echo/1'
const CHUNK_BYTES = 1 << 16

// libp2p 3 is written for Node 22; this is the one thing of it that Node 20 lacks.
Promise.withResolvers ??= () => {
  const parts = {}
  parts.promise = new Promise((resolve, reject) => Object.assign(parts, { resolve, reject }))
  return parts
}

const say = (object) => process.stdout.write(JSON.stringify(object) + '\n')

const flags = process.argv.slice(2)
const behind = flags.filter((flag) => flag.startsWith('behind=')).map((flag) => `${flag.slice(7)}/p2p-circuit`)
const circuits = flags.includes('circuits') || behind.length > 0
const listen = flags.filter((flag) => flag.startsWith('listen=')).map((flag) => flag.slice(7))
const addresses = [...behind, ...listen]
const node = await createLibp2p({
  addresses: { listen: addresses.length > 0 ? addresses : ['/ip4/127.0.0.1/tcp/0'] },
  transports: circuits ? [tcp(), circuitRelayTransport()] : [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  services: {
    identify: identify(),
    ping: ping(),
    ...(flags.includes('dcutr') ? { dcutr: dcutr() } : {}),
    ...(flags.includes('relay') ? { relay: circuitRelayServer() } : {})
  },
  connectionMonitor: { enabled: false }
})

await node.handle(ECHO, async (stream) => {
  try {
    for await (const data of stream) {
      if (!stream.send(data)) await stream.onDrain()
    }
    await stream.close()
  } catch (error) {
    stream.abort(error)
  }
}, { maxInboundStreams: 64, runOnLimitedConnection: true })

const identified = new Map() // peer id -> what its identify message said
node.addEventListener('peer:identify', ({ detail }) => {
  identified.set(detail.peerId.toString(), {
    agent: detail.agentVersion,
    protocols: [...detail.protocols].sort(),
    addrs: detail.listenAddrs.map(String),
    observed: detail.observedAddr?.toString() ?? null
  })
})

async function aboutPeer (peer) {
  const deadline = Date.now() + 5000
  while (!identified.has(peer)) {
    if (Date.now() > deadline) throw new Error(`peer ${peer} was not identified within 5 s`)
    await new Promise((resolve) => setTimeout(resolve, 10))
  }
  return identified.get(peer)
}

// Sends `size` random bytes and hashes what goes and what comes. Closes its direction when all is sent (halfClose),
// or when all came back.
async function echoThrough (stream, size, halfClose) {
  const sent = createHash('sha256')
  const received = createHash('sha256')
  let back = 0
  const reading = (async () => {
    for await (const data of stream) {
      for (const part of data instanceof Uint8Array ? [data] : data) received.update(part)
      back += data.byteLength
      if (back === size && !halfClose) break // p2pd answers a half-closed stream with a reset
    }
  })()
  for (let offset = 0; offset < size; offset += CHUNK_BYTES) {
    const chunk = randomBytes(Math.min(CHUNK_BYTES, size - offset))
    sent.update(chunk)
    if (!stream.send(chunk)) await stream.onDrain()
  }
  if (halfClose) await stream.close()
  await reading
  if (!halfClose) await stream.close()
  if (back !== size) throw new Error(`${back} of ${size} bytes came back`)
  return { sent_sha256: sent.digest('hex'), got_sha256: received.digest('hex'), bytes: back }
}

const commands = {
  dial: async ({ addr }) => ({ peer: (await node.dial(multiaddr(addr))).remotePeer.toString() }),
  ping: async ({ addr }) => ({ rtt_ms: await node.services.ping.ping(multiaddr(addr)) }),
  about: async ({ peer }) => aboutPeer(peer),
  echo: async ({ addr, bytes, half_close: halfClose = false }) => {
    const start = performance.now()
    const stream = await node.dialProtocol(multiaddr(addr), ECHO, { runOnLimitedConnection: true })
    return { ...(await echoThrough(stream, bytes, halfClose)), seconds: (performance.now() - start) / 1000 }
  },
  peers: async () => ({ peers: node.getPeers().map(String) })
}

async function obey (line) {
  const command = JSON.parse(line)
  try {
    say({ id: command.id, ...(await commands[command.do](command)) })
  } catch (error) {
    say({ id: command.id, error: `${error.name}: ${error.message}` })
  }
}

say({ ready: node.peerId.toString(), addrs: node.getMultiaddrs().map(String) })
const lines = createInterface({ input: process.stdin })
lines.on('line', obey)
lines.on('close', () => process.exit(0))
