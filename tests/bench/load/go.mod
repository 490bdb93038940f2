module clawstream/bench/load

go 1.22
