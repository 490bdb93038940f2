package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// engine answers with tokens of its vocabulary, one every `pace`, in SGLang's dialect and in OpenAI's.
type engine struct {
	vocabulary []Token
	pace       atomic.Int64
	asked      atomic.Int64
}

type generateBody struct {
	RID      string `json:"rid"`
	InputIDs []int  `json:"input_ids"`
	Sampling struct {
		MaxNewTokens int `json:"max_new_tokens"`
	} `json:"sampling_params"`
}

type chatBody struct {
	Model               string `json:"model"`
	Stream              bool   `json:"stream"`
	Logprobs            bool   `json:"logprobs"`
	MaxTokens           int    `json:"max_tokens"`
	MaxCompletionTokens int    `json:"max_completion_tokens"`
}

func serve(vocabulary []Token, arguments []string) {
	flags := flag.NewFlagSet("mock", flag.ExitOnError)
	port := flags.Int("port", 0, "to listen on")
	_ = flags.Parse(arguments)
	mock := &engine{vocabulary: vocabulary}
	routes := http.NewServeMux()
	routes.HandleFunc("POST /generate", mock.generate)
	routes.HandleFunc("POST /v1/chat/completions", mock.chat)
	routes.HandleFunc("POST /pace/{us}", mock.setPace)
	for path, text := range map[string]string{
		"/health":      `{}`,
		"/server_info": `{"context_length":131072}`,
		"/model_info":  `{"model_path":"mock","weight_version":"default"}`,
		"/v1/models":   `{"object":"list","data":[{"id":"mock","object":"model","root":"mock","parent":null,"max_model_len":131072}]}`,
	} {
		routes.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, []byte(text)) })
	}
	log.Fatal(http.ListenAndServe(net.JoinHostPort("127.0.0.1", strconv.Itoa(*port)), routes))
}

func (e *engine) setPace(w http.ResponseWriter, r *http.Request) {
	us, err := strconv.ParseInt(r.PathValue("us"), 10, 64)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	e.pace.Store(us * int64(time.Microsecond))
	writeJSON(w, []byte(`{}`))
}

// paced calls `each` with every token of an answer when it is due; a late one is followed at once by the next.
func (e *engine) paced(r *http.Request, numTokens int, each func(index int, token Token)) {
	at, number := time.Now(), int(e.asked.Add(1))
	for index := range numTokens {
		at = at.Add(time.Duration(e.pace.Load()))
		time.Sleep(time.Until(at))
		if r.Context().Err() != nil {
			return
		}
		each(index, e.vocabulary[(number*7919+index*104729)%len(e.vocabulary)])
	}
}

func logprob(token Token) float64 { return -float64(token.ID%997)/331 - 0.001234567 }

func (e *engine) generate(w http.ResponseWriter, r *http.Request) {
	var body generateBody
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	stream, flush := streaming(w)
	total, buffer := body.Sampling.MaxNewTokens, make([]byte, 0, 1024)
	e.paced(r, total, func(index int, token Token) {
		finish, versions := "null", ""
		if index == total-1 {
			finish = fmt.Sprintf(`{"type":"length","length":%d}`, total)
			versions = fmt.Sprintf(`,"weight_versions":[{"version":"default","start":0,"end":%d}]`, total)
		}
		buffer = fmt.Appendf(buffer[:0], `data: {"text":"%s","output_ids":[%d],"meta_info":{"id":"%s","finish_reason":%s,`+
			`"prompt_tokens":%d,"weight_version":"default","num_retractions":0,"input_token_logprobs":[],`+
			`"output_token_logprobs":[[%.9f,%d,null]],"output_token_logprobs_length":%d,"reasoning_tokens":0,`+
			`"completion_tokens":%d,"cached_tokens":0%s,"dp_rank":null}}`+"\n\n",
			token.Text, token.ID, body.RID, finish, len(body.InputIDs), logprob(token), token.ID, index+1, index+1, versions)
		_, _ = stream.Write(buffer)
		flush()
	})
	_, _ = stream.Write([]byte("data: [DONE]\n\n"))
}

func (e *engine) chat(w http.ResponseWriter, r *http.Request) {
	var body chatBody
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	total := max(body.MaxTokens, body.MaxCompletionTokens)
	frame := fmt.Sprintf(`"id":"chatcmpl-%d","created":1700000000,"model":%q`, e.asked.Load(), body.Model)
	if !body.Stream {
		e.chatWhole(w, r, body, frame, total)
		return
	}
	stream, flush := streaming(w)
	frame = `data: {` + frame + `,"object":"chat.completion.chunk","choices":[{"index":0,"delta":`
	buffer := make([]byte, 0, 1024)
	e.paced(r, total, func(index int, token Token) {
		buffer = append(buffer[:0], frame...)
		role := ""
		if index == 0 {
			role = `"role":"assistant",`
		}
		buffer = fmt.Appendf(buffer, `{%s"content":"%s"},"logprobs":%s,"finish_reason":null}]}`+"\n\n",
			role, token.Text, chatLogprobs(body.Logprobs, token))
		_, _ = stream.Write(buffer)
		flush()
	})
	_, _ = fmt.Fprint(stream, frame, `{},"logprobs":null,"finish_reason":"length"}]}`, "\n\ndata: [DONE]\n\n")
}

func (e *engine) chatWhole(w http.ResponseWriter, r *http.Request, body chatBody, frame string, total int) {
	var text, logprobs []string
	e.paced(r, total, func(_ int, token Token) {
		text = append(text, token.Text)
		logprobs = append(logprobs, chatLogprob(token))
	})
	shown := "null"
	if body.Logprobs {
		shown = `{"content":[` + strings.Join(logprobs, ",") + `]}`
	}
	writeJSON(w, fmt.Appendf(nil, `{%s,"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant",`+
		`"content":"%s"},"logprobs":%s,"finish_reason":"length"}],"usage":{"prompt_tokens":1,"completion_tokens":%d,`+
		`"total_tokens":%d}}`, frame, strings.Join(text, ""), shown, total, total+1))
}

func chatLogprobs(wanted bool, token Token) string {
	if !wanted {
		return "null"
	}
	return `{"content":[` + chatLogprob(token) + `]}`
}

func chatLogprob(token Token) string {
	return fmt.Sprintf(`{"token":"%s","logprob":%.9f,"bytes":null,"top_logprobs":[]}`, token.Text, logprob(token))
}

func streaming(w http.ResponseWriter) (http.ResponseWriter, func()) {
	w.Header().Set("Content-Type", "text/event-stream")
	return w, w.(http.Flusher).Flush
}

func writeJSON(w http.ResponseWriter, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(body)
}
