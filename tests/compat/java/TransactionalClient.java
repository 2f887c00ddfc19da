import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.Future;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.MemberToRemove;
import org.apache.kafka.clients.admin.RemoveMembersFromConsumerGroupOptions;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.ApplicationRecoverableException;
import org.apache.kafka.common.errors.AuthorizationException;
import org.apache.kafka.common.errors.InvalidProducerEpochException;
import org.apache.kafka.common.errors.OutOfOrderSequenceException;
import org.apache.kafka.common.errors.ProducerFencedException;
import org.apache.kafka.common.errors.TimeoutException;
import org.apache.kafka.common.errors.UnsupportedVersionException;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Drives a broker with Kafka's producers and consumers for the tests.
 *
 * <p>Reads one JSON request a line from standard input and answers each with one line:
 * {"ok": ...} or {"error": "..."}. Values travel as base64.
 */
public final class TransactionalClient {
    private static final ObjectMapper JSON = new ObjectMapper();

    private KafkaProducer<byte[], byte[]> producer;

    public static void main(String[] arguments) throws IOException {
        // Whatever libraries print goes elsewhere; standard output is for answers.
        PrintStream answers = System.out;
        System.setOut(System.err);
        BufferedReader lines =
                new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        TransactionalClient client = new TransactionalClient();
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            ObjectNode answer = JSON.createObjectNode();
            try {
                answer.set("ok", client.execute(JSON.readTree(line)));
            } catch (Exception failed) {
                answer.put("error", failed.toString());
            }
            answers.println(JSON.writeValueAsString(answer));
            answers.flush();
        }
        client.drop();
    }

    private JsonNode execute(JsonNode request) throws Exception {
        switch (request.get("command").asText()) {
            case "transact":
                return JSON.valueToTree(transact(request));
            case "stream":
                return JSON.valueToTree(stream(request));
            case "consume":
                return JSON.valueToTree(consume(request));
            case "transform":
                return JSON.valueToTree(transform(request));
            case "open":
                return JSON.valueToTree(open(request));
            case "abort":
                producer.abortTransaction();
                return JSON.valueToTree("aborted");
            case "remove_member":
                return JSON.valueToTree(removeMember(request));
            default:
                throw new IllegalArgumentException("no such command: " + request);
        }
    }

    /** Writes records to a partition, batch by batch; returns the offset of each. */
    private static List<Long> stream(JsonNode request) throws Exception {
        Properties config = new Properties();
        config.put("bootstrap.servers", request.get("bootstrap").asText());
        config.put("batch.size", request.get("batch_bytes").asText());
        config.put("max.in.flight.requests.per.connection", 1);
        config.put("key.serializer", ByteArraySerializer.class.getName());
        config.put("value.serializer", ByteArraySerializer.class.getName());
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        List<Long> offsets = new ArrayList<>();
        try (KafkaProducer<byte[], byte[]> streaming = new KafkaProducer<>(config)) {
            for (JsonNode record : request.get("records")) {
                sent.add(streaming.send(new ProducerRecord<>(request.get("topic").asText(),
                        record.get("partition").asInt(), null,
                        record.get("value").binaryValue())));
            }
            for (Future<RecordMetadata> each : sent) {
                offsets.add(each.get().offset());
            }
        }
        return offsets;
    }

    /** Reads so many records of a partition from its first one on. */
    private static List<Map<String, Object>> consume(JsonNode request) {
        Properties config = new Properties();
        config.put("bootstrap.servers", request.get("bootstrap").asText());
        config.put("auto.offset.reset", "none");
        config.put("enable.auto.commit", "false");
        config.put("key.deserializer", ByteArrayDeserializer.class.getName());
        config.put("value.deserializer", ByteArrayDeserializer.class.getName());
        TopicPartition from = new TopicPartition(
                request.get("topic").asText(), request.get("partition").asInt());
        long deadline = System.nanoTime()
                + Duration.ofSeconds(request.get("timeout_s").asInt()).toNanos();
        List<Map<String, Object>> found = new ArrayList<>();
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(config)) {
            consumer.assign(List.of(from));
            consumer.seek(from, 0);
            int count = request.get("count").asInt();
            while (found.size() < count && System.nanoTime() < deadline) {
                consumer.poll(Duration.ofMillis(100)).forEach(record -> found.add(
                        Map.of("offset", record.offset(), "value", record.value())));
            }
        }
        return found;
    }

    /** Begins, writes, ends in some way; says what it knows of how it ended. */
    private String transact(JsonNode request) throws Exception {
        if (producer == null) {
            producer = newProducer(request);
            if (producer == null) {
                return "none";
            }
        }
        String kind = request.get("kind").asText();
        boolean asked = false;
        try {
            producer.beginTransaction();
            for (JsonNode record : request.get("records")) {
                producer.send(new ProducerRecord<>(record.get("topic").asText(),
                        record.get("partition").asInt(), null, record.get("value").binaryValue()));
            }
            if (!kind.equals("commit")) {
                producer.flush(); // there shall be something to take back
            }
            switch (kind) {
                case "abort":
                    producer.abortTransaction();
                    return "aborted";
                case "forget": // a new producer of this id finds it open
                    drop();
                    return "aborted";
                case "zombie":
                    return beZombie(request);
                case "sleep":
                    Thread.sleep(request.get("sleep_ms").asLong());
                    break;
                default:
                    break;
            }
            asked = true;
            producer.commitTransaction();
            return "committed";
        } catch (KafkaException error) {
            return recover(error, asked);
        }
    }

    /** Begins and writes, and leaves the transaction open. */
    private String open(JsonNode request) throws Exception {
        producer = newProducer(request);
        producer.beginTransaction();
        for (JsonNode record : request.get("records")) {
            producer.send(new ProducerRecord<>(record.get("topic").asText(),
                    record.get("partition").asInt(), null, record.get("value").binaryValue()));
        }
        producer.flush();
        return "open";
    }

    /** Removes a static member from a group. */
    private static String removeMember(JsonNode request) throws Exception {
        Properties config = new Properties();
        config.put("bootstrap.servers", request.get("bootstrap").asText());
        try (Admin admin = Admin.create(config)) {
            admin.removeMembersFromConsumerGroup(request.get("group").asText(),
                    new RemoveMembersFromConsumerGroupOptions(List.of(
                            new MemberToRemove(request.get("instance").asText()))))
                    .all().get();
        }
        return "removed";
    }

    /** Lets a successor begin, and then asks for a commit all the same. */
    private String beZombie(JsonNode request) {
        KafkaProducer<byte[], byte[]> zombie = producer;
        producer = newProducer(request);
        if (producer == null) { // it may have begun, or not
            zombie.close(Duration.ZERO);
            return "aborted";
        }
        try {
            zombie.commitTransaction();
        } catch (KafkaException fenced) {
            return "aborted";
        } finally {
            zombie.close(Duration.ZERO);
        }
        throw new IllegalStateException("a zombie was told that it has committed");
    }

    /** Aborts if that can be, else begins as a new producer next time. */
    private String recover(KafkaException raised, boolean asked) {
        KafkaException error = raised;
        if (asked && error instanceof TimeoutException) {
            try { // the same commit, until it is said how it ended
                producer.commitTransaction();
                return "committed";
            } catch (KafkaException again) {
                error = again;
            }
        }
        if (isTheEnd(error)) {
            drop();
            return asked ? "unknown" : "aborted";
        }
        // The coordinator has not committed what it wants to be aborted.
        try {
            producer.abortTransaction();
        } catch (KafkaException again) {
            drop();
        }
        return "aborted";
    }

    /** Whether a producer that raised this is of no more use. */
    private static boolean isTheEnd(KafkaException error) {
        for (Throwable each = error; each != null; each = each.getCause()) {
            if (each instanceof ProducerFencedException
                    || each instanceof InvalidProducerEpochException
                    || each instanceof OutOfOrderSequenceException
                    || each instanceof AuthorizationException
                    || each instanceof UnsupportedVersionException
                    || each instanceof ApplicationRecoverableException
                    || each instanceof TimeoutException) {
                return true;
            }
        }
        return false;
    }

    /** Consumes so many records of a topic, and writes each once to another. */
    private Map<String, Integer> transform(JsonNode request) {
        String group = request.get("group").asText();
        Duration longest = Duration.ofSeconds(request.get("timeout_s").asInt());
        Properties config = new Properties();
        config.put("bootstrap.servers", request.get("bootstrap").asText());
        config.put("group.id", group);
        config.put("group.protocol", request.get("group_protocol").asText());
        config.put("auto.offset.reset", "earliest");
        config.put("enable.auto.commit", "false");
        config.put("isolation.level", "read_committed");
        config.put("max.poll.records", request.get("batch").asText());
        config.put("key.deserializer", ByteArrayDeserializer.class.getName());
        config.put("value.deserializer", ByteArrayDeserializer.class.getName());
        int committed = 0;
        int aborted = 0;
        long deadline = System.nanoTime() + longest.toNanos();
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(config);
                KafkaProducer<byte[], byte[]> transforming = newProducer(request)) {
            consumer.subscribe(List.of(request.get("source").asText()));
            int left = request.get("count").asInt();
            boolean abort = true;
            while (left > 0) {
                if (System.nanoTime() > deadline) {
                    throw new TimeoutException(left + " records have not come");
                }
                ConsumerRecords<byte[], byte[]> records = consumer.poll(Duration.ofMillis(100));
                if (records.isEmpty()) {
                    continue;
                }
                transforming.beginTransaction();
                Map<TopicPartition, OffsetAndMetadata> next = new HashMap<>();
                for (ConsumerRecord<byte[], byte[]> record : records) {
                    TopicPartition from = new TopicPartition(record.topic(), record.partition());
                    next.put(from, new OffsetAndMetadata(record.offset() + 1));
                    transforming.send(new ProducerRecord<>(request.get("target").asText(),
                            record.partition(), null, record.value()));
                }
                transforming.sendOffsetsToTransaction(next, consumer.groupMetadata());
                if (abort) { // every other one, and go back to what was committed
                    transforming.flush();
                    transforming.abortTransaction();
                    aborted++;
                    consumer.committed(next.keySet()).forEach((partition, position) ->
                            consumer.seek(partition, position == null ? 0 : position.offset()));
                } else {
                    transforming.commitTransaction();
                    committed++;
                    left -= records.count();
                }
                abort = !abort;
            }
        }
        return Map.of("committed", committed, "aborted", aborted);
    }

    /** Returns a producer that may begin, or null: nobody answered in time. */
    private static KafkaProducer<byte[], byte[]> newProducer(JsonNode request) {
        int timeoutMs = request.get("timeout_s").asInt() * 1000;
        Properties config = new Properties();
        config.put("bootstrap.servers", request.get("bootstrap").asText());
        config.put("transactional.id", request.get("transactional_id").asText());
        config.put("transaction.timeout.ms", request.get("transaction_timeout_ms").asText());
        config.put("max.block.ms", timeoutMs);
        config.put("request.timeout.ms", timeoutMs / 2);
        config.put("delivery.timeout.ms", timeoutMs);
        config.put("linger.ms", 0);
        config.put("reconnect.backoff.ms", 20);
        config.put("reconnect.backoff.max.ms", 200);
        config.put("key.serializer", ByteArraySerializer.class.getName());
        config.put("value.serializer", ByteArraySerializer.class.getName());
        KafkaProducer<byte[], byte[]> made = new KafkaProducer<>(config);
        try {
            made.initTransactions();
            return made;
        } catch (TimeoutException error) {
            made.close(Duration.ZERO);
            return null;
        }
    }

    private void drop() {
        if (producer != null) {
            producer.close(Duration.ZERO);
            producer = null;
        }
    }
}
