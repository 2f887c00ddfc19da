// Command franz drives a broker with franz-go for the compatibility tests.
//
// It reads one JSON request a line from standard input and answers each with one line:
// {"ok": ...} or {"error": "..."}. Bytes travel as base64; null is null.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

type header struct {
	Key   string  `json:"key"`
	Value *[]byte `json:"value"`
}

type record struct {
	Offset    int64    `json:"offset"`
	Partition int32    `json:"partition"`
	Key       *[]byte  `json:"key"`
	Value     *[]byte  `json:"value"`
	Headers   []header `json:"headers"`
	Timestamp *int64   `json:"timestamp_ms"`
}

type request struct {
	Command    string            `json:"command"`
	Bootstrap  string            `json:"bootstrap"`
	Topic      string            `json:"topic"`
	Partition  int32             `json:"partition"`
	Partitions int32             `json:"partitions"`
	Config     map[string]string `json:"config"`
	Records    []record          `json:"records"`
	Codec      string            `json:"codec"`
	Acks       string            `json:"acks"`
	Idempotent bool              `json:"idempotent"`
	MaxBytes   int32             `json:"max_request_bytes"`
	Offset     int64             `json:"offset"`
	Count      int               `json:"count"`
	Timestamp  int64             `json:"timestamp_ms"`
	Group      string            `json:"group"`
	TimeoutS   int               `json:"timeout_s"`
	TxnID      string            `json:"transactional_id"`
	Commit     bool              `json:"commit"`
}

var commands = map[string]func(context.Context, request) (any, error){
	"topics":             topics,
	"create_topic":       createTopic,
	"create_partitions":  createPartitions,
	"delete_topic":       deleteTopic,
	"delete_records":     deleteRecords,
	"topic_config":       topicConfig,
	"alter_topic_config": alterTopicConfig,
	"produce":            produce,
	"consume":            consume,
	"consume_group":      consumeGroup,
	"offsets":            offsets,
	"offset_for_time":    offsetForTime,
	"transact":           transact,
}

func main() {
	lines := bufio.NewReaderSize(os.Stdin, 1<<20)
	out := json.NewEncoder(os.Stdout)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return
		}
		var req request
		if err := json.Unmarshal(line, &req); err != nil {
			fail(out, err)
			continue
		}
		run, found := commands[req.Command]
		if !found {
			fail(out, fmt.Errorf("no command %q", req.Command))
			continue
		}
		ctx, cancel := context.WithTimeout(
			context.Background(), time.Duration(req.TimeoutS)*time.Second)
		answer, err := run(ctx, req)
		cancel()
		if err != nil {
			fail(out, err)
		} else if err := out.Encode(map[string]any{"ok": answer}); err != nil {
			return
		}
	}
}

func fail(out *json.Encoder, err error) {
	_ = out.Encode(map[string]any{"error": err.Error()})
}

func client(req request, options ...kgo.Opt) (*kgo.Client, error) {
	return kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(req.Bootstrap)}, options...)...)
}

func withAdmin(
	req request, use func(*kadm.Client) (any, error),
) (any, error) {
	found, err := client(req)
	if err != nil {
		return nil, err
	}
	defer found.Close()
	return use(kadm.NewClient(found))
}

func topics(ctx context.Context, req request) (any, error) {
	return withAdmin(req, func(admin *kadm.Client) (any, error) {
		details, err := admin.ListTopics(ctx)
		if err != nil {
			return nil, err
		}
		found := map[string]int{}
		for _, topic := range details {
			found[topic.Topic] = len(topic.Partitions)
		}
		return found, details.Error()
	})
}

func createTopic(ctx context.Context, req request) (any, error) {
	return withAdmin(req, func(admin *kadm.Client) (any, error) {
		configs := map[string]*string{}
		for key, value := range req.Config {
			configs[key] = &value
		}
		_, err := admin.CreateTopic(ctx, req.Partitions, 1, configs, req.Topic)
		return nil, err
	})
}

func createPartitions(ctx context.Context, req request) (any, error) {
	return withAdmin(req, func(admin *kadm.Client) (any, error) {
		done, err := admin.UpdatePartitions(ctx, int(req.Partitions), req.Topic)
		if err != nil {
			return nil, err
		}
		return nil, done.Error()
	})
}

func deleteTopic(ctx context.Context, req request) (any, error) {
	return withAdmin(req, func(admin *kadm.Client) (any, error) {
		_, err := admin.DeleteTopic(ctx, req.Topic)
		return nil, err
	})
}

func deleteRecords(ctx context.Context, req request) (any, error) {
	return withAdmin(req, func(admin *kadm.Client) (any, error) {
		wanted := kadm.Offsets{}
		wanted.AddOffset(req.Topic, req.Partition, req.Offset, -1)
		done, err := admin.DeleteRecords(ctx, wanted)
		if err != nil {
			return nil, err
		}
		one, found := done.Lookup(req.Topic, req.Partition)
		if !found {
			return nil, errors.New("no answer for the partition")
		}
		return one.LowWatermark, one.Err
	})
}

func topicConfig(ctx context.Context, req request) (any, error) {
	return withAdmin(req, func(admin *kadm.Client) (any, error) {
		all, err := admin.DescribeTopicConfigs(ctx, req.Topic)
		if err != nil {
			return nil, err
		}
		one, err := all.On(req.Topic, nil)
		if err != nil {
			return nil, err
		}
		found := map[string]string{}
		for _, config := range one.Configs {
			found[config.Key] = config.MaybeValue()
		}
		return found, one.Err
	})
}

func alterTopicConfig(ctx context.Context, req request) (any, error) {
	return withAdmin(req, func(admin *kadm.Client) (any, error) {
		changes := []kadm.AlterConfig{}
		for key, value := range req.Config {
			changes = append(changes, kadm.AlterConfig{
				Op: kadm.SetConfig, Name: key, Value: &value})
		}
		done, err := admin.AlterTopicConfigs(ctx, changes, req.Topic)
		if err != nil {
			return nil, err
		}
		one, err := done.On(req.Topic, nil)
		if err != nil {
			return nil, err
		}
		return nil, one.Err
	})
}

var codecs = map[string]kgo.CompressionCodec{
	"none":   kgo.NoCompression(),
	"gzip":   kgo.GzipCompression(),
	"snappy": kgo.SnappyCompression(),
	"lz4":    kgo.Lz4Compression(),
	"zstd":   kgo.ZstdCompression(),
}

var acks = map[string]kgo.Acks{
	"0": kgo.NoAck(), "1": kgo.LeaderAck(), "all": kgo.AllISRAcks(),
}

func outgoing(topic string, given []record) []*kgo.Record {
	records := make([]*kgo.Record, len(given))
	for i, each := range given {
		found := &kgo.Record{Topic: topic, Partition: each.Partition}
		if each.Key != nil {
			found.Key = notNil(*each.Key)
		}
		if each.Value != nil {
			found.Value = notNil(*each.Value)
		}
		for _, one := range each.Headers {
			added := kgo.RecordHeader{Key: one.Key}
			if one.Value != nil {
				added.Value = notNil(*one.Value)
			}
			found.Headers = append(found.Headers, added)
		}
		if each.Timestamp != nil {
			found.Timestamp = time.UnixMilli(*each.Timestamp)
		}
		records[i] = found
	}
	return records
}

func notNil(value []byte) []byte {
	if value == nil {
		return []byte{}
	}
	return value
}

func produce(ctx context.Context, req request) (any, error) {
	options := []kgo.Opt{
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ProducerBatchCompression(codecs[req.Codec]),
		kgo.RequiredAcks(acks[req.Acks]),
		kgo.ProducerBatchMaxBytes(req.MaxBytes),
		kgo.ProducerLinger(5 * time.Millisecond),
	}
	if req.MaxBytes > 1<<20 {
		options = append(options, kgo.BrokerMaxWriteBytes(2*req.MaxBytes))
	}
	if !req.Idempotent || req.Acks != "all" {
		options = append(options, kgo.DisableIdempotentWrite())
	}
	found, err := client(req, options...)
	if err != nil {
		return nil, err
	}
	defer found.Close()
	records := outgoing(req.Topic, req.Records)
	if err := found.ProduceSync(ctx, records...).FirstErr(); err != nil {
		return nil, err
	}
	// In the order asked; results come as they are acknowledged.
	offsets := make([]int64, len(records))
	for i, each := range records {
		offsets[i] = each.Offset
		if req.Acks == "0" {
			offsets[i] = -1
		}
	}
	return offsets, nil
}

func incoming(each *kgo.Record) record {
	timestamp := each.Timestamp.UnixMilli()
	found := record{
		Offset: each.Offset, Partition: each.Partition, Timestamp: &timestamp,
		Key: pointer(each.Key), Value: pointer(each.Value), Headers: []header{},
	}
	for _, one := range each.Headers {
		found.Headers = append(found.Headers, header{one.Key, pointer(one.Value)})
	}
	return found
}

func pointer(value []byte) *[]byte {
	if value == nil {
		return nil
	}
	return &value
}

func poll(ctx context.Context, from *kgo.Client, count int) ([]record, error) {
	found := []record{}
	for len(found) < count {
		fetches := from.PollFetches(ctx)
		if ctx.Err() != nil {
			return found, nil // what came in time
		}
		if err := fetches.Err(); err != nil {
			return nil, err
		}
		fetches.EachRecord(func(each *kgo.Record) {
			found = append(found, incoming(each))
		})
	}
	return found, nil
}

func consume(ctx context.Context, req request) (any, error) {
	found, err := client(req,
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{
			req.Topic: {req.Partition: kgo.NewOffset().At(req.Offset)},
		}),
		kgo.ConsumeResetOffset(kgo.NoResetOffset()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
	)
	if err != nil {
		return nil, err
	}
	defer found.Close()
	records, err := poll(ctx, found, req.Count)
	if len(records) > req.Count {
		records = records[:req.Count]
	}
	return records, err
}

// consumeGroup joins a group, reads count records, commits them and leaves.
func consumeGroup(ctx context.Context, req request) (any, error) {
	found, err := client(req,
		kgo.ConsumerGroup(req.Group),
		kgo.ConsumeTopics(req.Topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.DisableAutoCommit(),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
	)
	if err != nil {
		return nil, err
	}
	defer found.Close()
	records, err := poll(ctx, found, req.Count)
	if err != nil {
		return nil, err
	}
	if err := found.CommitUncommittedOffsets(ctx); err != nil {
		return nil, err
	}
	return records, nil
}

func offsets(ctx context.Context, req request) (any, error) {
	return withAdmin(req, func(admin *kadm.Client) (any, error) {
		first, err := admin.ListStartOffsets(ctx, req.Topic)
		if err != nil {
			return nil, err
		}
		end, err := admin.ListEndOffsets(ctx, req.Topic)
		if err != nil {
			return nil, err
		}
		one, _ := first.Lookup(req.Topic, req.Partition)
		other, _ := end.Lookup(req.Topic, req.Partition)
		return []int64{one.Offset, other.Offset}, errors.Join(one.Err, other.Err)
	})
}

func offsetForTime(ctx context.Context, req request) (any, error) {
	return withAdmin(req, func(admin *kadm.Client) (any, error) {
		listed, err := admin.ListOffsetsAfterMilli(ctx, req.Timestamp, req.Topic)
		if err != nil {
			return nil, err
		}
		one, found := listed.Lookup(req.Topic, req.Partition)
		if !found || one.Timestamp < 0 {
			return nil, one.Err // kadm answers the end where no record is as late
		}
		return one.Offset, one.Err
	})
}

// transact writes records in one transaction and commits or aborts it.
func transact(ctx context.Context, req request) (any, error) {
	found, err := client(req,
		kgo.TransactionalID(req.TxnID),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.TransactionTimeout(time.Duration(req.TimeoutS)*time.Second),
	)
	if err != nil {
		return nil, err
	}
	defer found.Close()
	if err := found.BeginTransaction(); err != nil {
		return nil, err
	}
	results := found.ProduceSync(ctx, outgoing(req.Topic, req.Records)...)
	if err := results.FirstErr(); err != nil {
		return nil, err
	}
	return strconv.Itoa(len(results)),
		found.EndTransaction(ctx, kgo.TransactionEndTry(req.Commit))
}
