// Drives a broker with kafkajs for the compatibility tests.
//
// One JSON request a line on standard input, one line of answer each: {"ok": ...} or
// {"error": "..."}. Bytes travel as base64; null is null.
'use strict'

const { CompressionTypes, Kafka, logLevel } = require('kafkajs')
const readline = require('node:readline')

const encode = (value) => (value == null ? null : Buffer.from(value).toString('base64'))
const decode = (value) => (value == null ? null : Buffer.from(value, 'base64'))

const CODECS = { none: CompressionTypes.None, gzip: CompressionTypes.GZIP }

function connect(request) {
  return new Kafka({
    clientId: 'kafkajs-test',
    brokers: request.bootstrap.split(','),
    logLevel: logLevel.NOTHING,
    retry: { initialRetryTime: 50, retries: request.retries ?? 5 },
  })
}

async function using(thing, use) {
  await thing.connect()
  try {
    return await use(thing)
  } finally {
    await thing.disconnect()
  }
}

function outgoing(record) {
  return {
    key: decode(record.key),
    value: decode(record.value),
    partition: record.partition,
    timestamp: record.timestamp_ms == null ? undefined : String(record.timestamp_ms),
    headers: Object.fromEntries(record.headers.map((h) => [h.key, decode(h.value)])),
  }
}

// Join a group, read until `count` records are there, commit them if asked, and leave.
function consumeGroup(request) {
  const consumer = connect(request).consumer({
    groupId: request.group,
    maxWaitTimeInMs: 100,
    sessionTimeout: 10000,
    heartbeatInterval: 500,
    readUncommitted: false,
  })
  return using(consumer, (joined) =>
    new Promise((resolve, reject) => {
      const found = []
      const late = setTimeout(() => resolve(found), request.timeout_s * 1000)
      joined.on(joined.events.CRASH, ({ payload }) => reject(payload.error))
      joined
        .subscribe({ topics: [request.topic], fromBeginning: true })
        .then(() =>
          joined.run({
            autoCommit: false,
            eachMessage: async ({ partition, message }) => {
              if (found.length >= request.count) return
              found.push({
                partition,
                offset: Number(message.offset),
                key: encode(message.key),
                value: encode(message.value),
                timestamp_ms: Number(message.timestamp),
                headers: Object.entries(message.headers).map(([key, value]) => ({
                  key,
                  value: encode(value),
                })),
              })
              if (found.length < request.count) return
              if (request.commit) {
                const ends = {}
                for (const each of found) {
                  ends[each.partition] = Math.max(
                    ends[each.partition] ?? 0, each.offset + 1)
                }
                await joined.commitOffsets(
                  Object.entries(ends).map(([number, offset]) => ({
                    topic: request.topic,
                    partition: Number(number),
                    offset: String(offset),
                  })))
              }
              clearTimeout(late)
              resolve(found)
            },
          }))
        .catch(reject)
    }))
}

const commands = {
  topics: (request) =>
    using(connect(request).admin(), async (admin) => {
      const { topics } = await admin.fetchTopicMetadata()
      return Object.fromEntries(topics.map((t) => [t.name, t.partitions.length]))
    }),

  create_topic: (request) =>
    using(connect(request).admin(), (admin) =>
      admin.createTopics({
        waitForLeaders: true,
        topics: [
          {
            topic: request.topic,
            numPartitions: request.partitions,
            replicationFactor: 1,
            configEntries: Object.entries(request.config).map(([name, value]) => ({
              name,
              value,
            })),
          },
        ],
      })),

  delete_topic: (request) =>
    using(connect(request).admin(), (admin) =>
      admin.deleteTopics({ topics: [request.topic] })),

  offsets: (request) =>
    using(connect(request).admin(), async (admin) => {
      const found = await admin.fetchTopicOffsets(request.topic)
      const mine = found.find((each) => each.partition === request.partition)
      return [Number(mine.low), Number(mine.high)]
    }),

  group_offsets: (request) =>
    using(connect(request).admin(), async (admin) => {
      const found = await admin.fetchOffsets({
        groupId: request.group,
        topics: [request.topic],
      })
      return found[0].partitions.map((each) => [each.partition, Number(each.offset)])
    }),

  groups: (request) =>
    using(connect(request).admin(), async (admin) => {
      const { groups } = await admin.listGroups()
      return groups.map((each) => each.groupId)
    }),

  produce: (request) =>
    using(
      connect(request).producer({ idempotent: request.idempotent, maxInFlightRequests: 1 }),
      async (producer) => {
        const done = await producer.send({
          topic: request.topic,
          acks: request.acks === 'all' ? -1 : Number(request.acks),
          compression: CODECS[request.codec],
          messages: request.records.map(outgoing),
        })
        return done.map((each) => [each.partition, Number(each.baseOffset)])
      }),

  // Send the records one after the other; return the offset of each.
  stream: (request) =>
    using(
      connect(request).producer({ idempotent: true, maxInFlightRequests: 1 }),
      async (producer) => {
        const offsets = []
        for (const record of request.records) {
          const [done] = await producer.send({
            topic: request.topic,
            acks: -1,
            messages: [outgoing(record)],
          })
          offsets.push(Number(done.baseOffset))
        }
        return offsets
      }),

  transact: (request) =>
    using(
      connect(request).producer({
        idempotent: true,
        maxInFlightRequests: 1,
        transactionalId: request.transactional_id,
      }),
      async (producer) => {
        const transaction = await producer.transaction()
        await transaction.send({
          topic: request.topic,
          messages: request.records.map(outgoing),
        })
        await (request.commit ? transaction.commit() : transaction.abort())
        return request.records.length
      }),

  consume_group: consumeGroup,
}

async function main() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const request = JSON.parse(line)
    let answer
    try {
      answer = { ok: (await commands[request.command](request)) ?? null }
    } catch (error) {
      answer = { error: `${error.name}: ${error.message}` }
    }
    process.stdout.write(JSON.stringify(answer) + '\n')
  }
}

main()
