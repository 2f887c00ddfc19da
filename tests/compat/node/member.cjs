// One kafkajs group consumer, as tests/compat/group_member.py is one of other libraries:
//
//   node member.cjs BOOTSTRAP GROUP TOPIC OPTIONS_JSON
//
// Prints a JSON line whenever its assignment changes, {"assigned": [partitions]}, or
// records have come, {"got": [[partition, offset], ...]}, which it then commits. SIGTERM
// makes it leave the group.
'use strict'

const { Kafka, logLevel } = require('kafkajs')

const [bootstrap, groupId, topic, options] = process.argv.slice(2)
const { session_ms: sessionTimeout, heartbeat_ms: heartbeatInterval } =
  JSON.parse(options)

function say(words) {
  process.stdout.write(JSON.stringify(words) + '\n')
}

async function main() {
  const kafka = new Kafka({
    brokers: [bootstrap],
    logLevel: logLevel.NOTHING,
    retry: { initialRetryTime: 50, maxRetryTime: 500, retries: 100 },
  })
  const consumer = kafka.consumer({
    groupId,
    sessionTimeout,
    heartbeatInterval,
    maxWaitTimeInMs: heartbeatInterval, // it says that it lives between two fetches
    rebalanceTimeout: 60000,
  })
  process.on('SIGTERM', () => consumer.disconnect().then(() => process.exit(0)))
  consumer.on(consumer.events.GROUP_JOIN, ({ payload }) =>
    say({ assigned: [...(payload.memberAssignment[topic] ?? [])].sort() }))
  await consumer.connect()
  await consumer.subscribe({ topics: [topic], fromBeginning: true })
  await consumer.run({
    autoCommit: false,
    eachBatch: async ({ batch }) => {
      // Said first: who is killed in between has not committed in silence.
      say({ got: batch.messages.map((m) => [batch.partition, Number(m.offset)]) })
      const offset = String(Number(batch.lastOffset()) + 1)
      try {
        await consumer.commitOffsets([{ topic, partition: batch.partition, offset }])
      } catch (ignored) {
        // A rebalance was faster: read once more.
      }
    },
  })
}

main()
