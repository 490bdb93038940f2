package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"math/rand"
	"net/http"
	"os"
	"sort"
	"strings"
	"sync"
	"time"
)

// Message is one of a conversation's.
type Message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

const maxMessages = 30 // then a worker goes on with a new conversation in place of this one

type asker struct {
	url, model                       string
	concurrency, tokens, size, turns int
	logprobs, continued              bool
	seconds                          float64
	vocabulary                       []Token
	client                           *http.Client
}

// answer is what came of one request; why is empty where it was whole.
type answer struct {
	text   string
	ttft   time.Duration
	chunks int
	why    string
}

type tally struct {
	sync.Mutex
	ttft   []float64
	chunks int
	failed int
	why    map[string]int
}

func (t *tally) add(a answer) {
	t.Lock()
	defer t.Unlock()
	if a.why != "" {
		t.failed++
		t.why[a.why]++
		return
	}
	t.chunks += a.chunks
	t.ttft = append(t.ttft, float64(a.ttft.Microseconds())/1000)
}

// ask warms up, says "primed", waits for a line, asks for `seconds`, and prints one JSON object.
func ask(vocabulary []Token, arguments []string, orders *bufio.Reader) {
	a := &asker{vocabulary: vocabulary}
	flags := flag.NewFlagSet("ask", flag.ExitOnError)
	flags.StringVar(&a.url, "url", "", "of chat completions")
	flags.StringVar(&a.model, "model", "", "to ask for")
	flags.IntVar(&a.concurrency, "concurrency", 1, "requests under way at once")
	flags.IntVar(&a.tokens, "tokens", 100, "of each answer")
	flags.IntVar(&a.size, "bytes", 5000, "of a measured request's messages")
	flags.IntVar(&a.turns, "turns", 8, "conversations that each worker goes on with, where they are continued")
	flags.BoolVar(&a.logprobs, "logprobs", false, "ask for log-probs")
	flags.BoolVar(&a.continued, "continued", false, "measured requests continue conversations")
	flags.Float64Var(&a.seconds, "seconds", 5, "to ask for")
	seed := flags.Int64("seed", 0, "of the words")
	_ = flags.Parse(arguments)
	a.client = &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: a.concurrency, DisableCompression: true, MaxIdleConns: 0,
	}}
	primed, counted := &tally{why: map[string]int{}}, &tally{why: map[string]int{}}
	var ready, done sync.WaitGroup
	begin := make(chan time.Time)
	for worker := range a.concurrency {
		ready.Add(1)
		done.Add(1)
		go func() {
			defer done.Done()
			rng := rand.New(rand.NewSource(*seed*1_000_003 + int64(worker)))
			conversations := a.prime(rng, primed)
			ready.Done()
			for turn, end := 0, <-begin; time.Now().Before(end); turn++ {
				a.measured(rng, conversations, turn, counted)
			}
		}()
	}
	ready.Wait()
	fmt.Println("primed")
	if _, err := orders.ReadString('\n'); err != nil {
		log.Fatal(err)
	}
	started := time.Now()
	for range a.concurrency {
		begin <- started.Add(time.Duration(a.seconds * float64(time.Second)))
	}
	done.Wait()
	counted.report(time.Since(started), primed)
}

// prime opens the worker's connection, and the conversations that it will continue.
func (a *asker) prime(rng *rand.Rand, into *tally) [][]Message {
	if !a.continued {
		into.add(a.send(a.conversation(rng, 8, a.size), min(a.tokens, 10)))
		return nil
	}
	conversations := make([][]Message, a.turns)
	for index := range conversations {
		opening := a.conversation(rng, 6, a.size*3/4)
		found := a.send(opening, a.tokens)
		into.add(found)
		conversations[index] = a.extended(rng, opening, found.text)
	}
	return conversations
}

func (a *asker) measured(rng *rand.Rand, conversations [][]Message, turn int, into *tally) {
	if !a.continued {
		into.add(a.send(a.conversation(rng, 8, a.size), a.tokens))
		return
	}
	messages := &conversations[turn%len(conversations)]
	if len(*messages) > maxMessages {
		*messages = a.conversation(rng, 6, a.size*3/4)
	}
	found := a.send(*messages, a.tokens)
	into.add(found)
	*messages = a.extended(rng, *messages, found.text)
}

// conversation is new from its first word on: a system prompt, then people and answers in turn, the last a person's.
func (a *asker) conversation(rng *rand.Rand, numMessages, numBytes int) []Message {
	messages := []Message{{"system", a.words(rng, numBytes/numMessages)}}
	for len(messages) < numMessages-1 {
		messages = append(messages, Message{[]string{"assistant", "user"}[len(messages)%2], a.words(rng, numBytes/numMessages)})
	}
	return append(messages, Message{"user", a.words(rng, numBytes/numMessages)})
}

func (a *asker) extended(rng *rand.Rand, messages []Message, text string) []Message {
	return append(messages[:len(messages):len(messages)], Message{"assistant", text}, Message{"user", a.words(rng, a.size/8)})
}

func (a *asker) words(rng *rand.Rand, numBytes int) string {
	var text strings.Builder
	for text.Len() < numBytes {
		text.WriteString(a.vocabulary[rng.Intn(len(a.vocabulary))].Text)
		if rng.Intn(12) == 0 {
			text.WriteString([]string{".", ",", ":\n", "?"}[rng.Intn(4)])
		}
	}
	return text.String()[1:]
}

func (a *asker) send(messages []Message, tokens int) answer {
	request := map[string]any{
		"model": a.model, "messages": messages, "stream": true, "max_tokens": tokens, "temperature": 1,
	}
	if a.logprobs {
		request["logprobs"] = true
	}
	body, err := json.Marshal(request)
	if err != nil {
		log.Fatal(err)
	}
	started := time.Now()
	response, err := a.client.Post(a.url, "application/json", bytes.NewReader(body))
	if err != nil {
		return answer{why: "no answer: " + err.Error()}
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		said, _ := io.ReadAll(io.LimitReader(response.Body, 300))
		return answer{why: fmt.Sprintf("status %d: %s", response.StatusCode, said)}
	}
	return follow(response.Body, started, tokens)
}

// content returns what follows `"content":"` up to the next quote. Answers are of plain words with no escapes, and to
// parse them would cost what a gateway costs.
func content(line []byte) []byte {
	_, rest, _ := bytes.Cut(line, []byte(`"content":`))
	rest, opened := bytes.CutPrefix(bytes.TrimPrefix(rest, []byte(" ")), []byte(`"`))
	if !opened {
		return nil
	}
	text, _, _ := bytes.Cut(rest, []byte(`"`))
	return text
}

// follow reads a stream to its end and checks that every token came, and how it ended.
func follow(body io.Reader, started time.Time, tokens int) answer {
	var found answer
	var text strings.Builder
	finished, done := false, false
	lines := bufio.NewReaderSize(body, 1<<16)
	for {
		line, err := lines.ReadSlice('\n')
		switch {
		case err == io.EOF:
			found.text = text.String()
			found.why = problem(found.text, tokens, finished, done)
			return found
		case err != nil:
			return answer{why: "cut: " + err.Error()}
		case bytes.HasPrefix(line, []byte("data: [DONE]")):
			done = true
		case bytes.HasPrefix(line, []byte("data: {")):
			if new := content(line); len(new) > 0 {
				if found.chunks == 0 {
					found.ttft = time.Since(started)
				}
				text.Write(new)
				found.chunks++
			}
			finished = finished || bytes.Contains(line, []byte(`"length"`))
		}
	}
}

func problem(text string, tokens int, finished, done bool) string {
	if words := len(strings.Fields(text)); words != tokens {
		return fmt.Sprintf("%d words in an answer, expected %d", words, tokens)
	}
	if !finished || !done {
		return fmt.Sprintf("the stream's end: finish_reason %t, [DONE] %t", finished, done)
	}
	return ""
}

func (t *tally) report(took time.Duration, primed *tally) {
	sort.Float64s(t.ttft)
	quantile := func(q float64) float64 {
		if len(t.ttft) == 0 {
			return -1
		}
		return t.ttft[min(int(q*float64(len(t.ttft))), len(t.ttft)-1)]
	}
	for why, times := range primed.why {
		t.why["before it counted: "+why] += times
	}
	_ = json.NewEncoder(os.Stdout).Encode(map[string]any{
		"ok": len(t.ttft), "failed": t.failed + primed.failed, "why": t.why, "seconds": took.Seconds(),
		"ttft_ms_p50": quantile(0.5), "ttft_ms_p99": quantile(0.99), "chunks": t.chunks,
	})
}
