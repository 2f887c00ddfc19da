package org.apache.spark.kafka010;

import java.util.HashMap;
import scala.Option;
import scala.collection.immutable.Map;

/** Kafka parameters that may be changed; here, none is ever for a delegation token. */
public final class KafkaConfigUpdater {
    private final java.util.Map<String, Object> parameters = new HashMap<>();

    public KafkaConfigUpdater(String module, Map<String, Object> parameters) {
        parameters.foreach(pair -> this.parameters.put(pair._1(), pair._2()));
    }

    public KafkaConfigUpdater set(String name, Object value) {
        parameters.put(name, value);
        return this;
    }

    public KafkaConfigUpdater setIfUnset(String name, Object value) {
        parameters.putIfAbsent(name, value);
        return this;
    }

    public KafkaConfigUpdater setAuthenticationConfigIfNeeded() {
        return this;
    }

    public KafkaConfigUpdater setAuthenticationConfigIfNeeded(Option<?> cluster) {
        return this;
    }

    public java.util.Map<String, Object> build() {
        return parameters;
    }
}
