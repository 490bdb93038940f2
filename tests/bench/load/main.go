// A mock engine and a load generator for `tests.bench gateway`: `load mock` and `load ask`.
//
// The one rule: both cost far less than any gateway between them, which the bench's direct arm shows.
package main

import (
	"bufio"
	"encoding/json"
	"log"
	"os"
	"runtime/debug"
)

// Token is one entry of the vocabulary that answers and prompts are made of: a space and a word.
type Token struct {
	ID   int    `json:"id"`
	Text string `json:"text"`
}

func main() {
	debug.SetGCPercent(1000)
	log.SetFlags(0)
	if len(os.Args) < 3 {
		log.Fatal("usage: load mock|ask VOCABULARY.json [flags]")
	}
	vocabulary := read(os.Args[2])
	switch os.Args[1] {
	case "mock":
		serve(vocabulary, os.Args[3:])
	case "ask":
		ask(vocabulary, os.Args[3:], bufio.NewReader(os.Stdin))
	default:
		log.Fatalf("load %s: expected mock or ask", os.Args[1])
	}
}

func read(path string) []Token {
	raw, err := os.ReadFile(path)
	if err != nil {
		log.Fatal(err)
	}
	var vocabulary []Token
	if err := json.Unmarshal(raw, &vocabulary); err != nil || len(vocabulary) == 0 {
		log.Fatalf("%s: not a list of tokens: %v", path, err)
	}
	return vocabulary
}
