module baggageclaim/gcs-double

go 1.25.0
