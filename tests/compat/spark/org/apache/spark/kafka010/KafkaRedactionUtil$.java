package org.apache.spark.kafka010;

import scala.collection.immutable.Seq;

/** What is hidden in logs: nothing, where nothing is secret. */
public final class KafkaRedactionUtil$ {
    public static final KafkaRedactionUtil$ MODULE$ = new KafkaRedactionUtil$();

    public Seq<?> redactParams(Seq<?> parameters) {
        return parameters;
    }
}
