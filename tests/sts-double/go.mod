module baggageclaim/sts-double

go 1.25.0
