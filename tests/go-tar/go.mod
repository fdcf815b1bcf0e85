module baggageclaim/go-tar

go 1.25.0
