// Reads a tar stream from standard input with Go's archive/tar, and prints one JSON object for each
// entry. Names, targets and records are bytes, so they are printed in hex.
package main

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
)

type entry struct {
	Name    string            `json:"name"`
	Type    string            `json:"type"`
	Size    int64             `json:"size"`
	Mode    int64             `json:"mode"`
	Uid     int               `json:"uid"`
	Gid     int               `json:"gid"`
	Seconds int64             `json:"seconds"`
	Nanos   int               `json:"nanos"`
	Target  string            `json:"target"`
	Major   int64             `json:"major"`
	Minor   int64             `json:"minor"`
	Records map[string]string `json:"records"`
	Sha256  string            `json:"sha256"`
}

func list(in io.Reader, out io.Writer) error {
	reader, printer := tar.NewReader(in), json.NewEncoder(out)
	for {
		head, err := reader.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		// A hole is read as its zeros.
		hash := sha256.New()
		read, err := io.Copy(hash, reader)
		if err != nil {
			return fmt.Errorf("%q: %w", head.Name, err)
		}
		if read != head.Size {
			return fmt.Errorf("%q: %d bytes of %d", head.Name, read, head.Size)
		}
		records := map[string]string{}
		for key, value := range head.PAXRecords {
			records[hex.EncodeToString([]byte(key))] = hex.EncodeToString([]byte(value))
		}
		err = printer.Encode(entry{
			Name:    hex.EncodeToString([]byte(head.Name)),
			Type:    string(rune(head.Typeflag)),
			Size:    head.Size,
			Mode:    head.Mode,
			Uid:     head.Uid,
			Gid:     head.Gid,
			Seconds: head.ModTime.Unix(),
			Nanos:   head.ModTime.Nanosecond(),
			Target:  hex.EncodeToString([]byte(head.Linkname)),
			Major:   head.Devmajor,
			Minor:   head.Devminor,
			Records: records,
			Sha256:  hex.EncodeToString(hash.Sum(nil)),
		})
		if err != nil {
			return err
		}
	}
}

func main() {
	if err := list(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "go-tar:", err)
		os.Exit(1)
	}
}
