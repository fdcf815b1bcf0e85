// A double of Google Cloud Storage's XML API, in memory: what the client of the shared tier calls,
// as https://cloud.google.com/storage/docs/xml-api describes it. It prints its address.
//
// It knows no credentials, unless it has a token as its argument. Then it is also the metadata
// server that gives this token, and each other request must have it.
package main

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"
)

const page = 1000

type object struct {
	content    []byte
	generation int64
	modified   time.Time
}

func (o *object) etag() string { return fmt.Sprintf("\"g%d\"", o.generation) }

type server struct {
	lock    sync.Mutex
	objects map[string]*object
	uploads map[string]map[int][]byte
	last    int64
	token   string
}

func fail(w http.ResponseWriter, status int, code string) {
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	fmt.Fprintf(w, "<?xml version='1.0' encoding='UTF-8'?><Error><Code>%s</Code></Error>", code)
}

func answer(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/xml")
	if err := xml.NewEncoder(w).Encode(value); err != nil {
		log.Print(err)
	}
}

// Stores an object, if the generation that the request names is the current one; 0: there is none.
func (s *server) store(w http.ResponseWriter, r *http.Request, key string, content []byte) bool {
	var current int64
	if there := s.objects[key]; there != nil {
		current = there.generation
	}
	if want := r.Header.Get("x-goog-if-generation-match"); want != "" && want != strconv.FormatInt(current, 10) {
		fail(w, http.StatusPreconditionFailed, "PreconditionFailed")
		return false
	}
	s.last++
	made := &object{content, s.last, time.Now()}
	s.objects[key] = made
	w.Header().Set("ETag", made.etag())
	w.Header().Set("x-goog-generation", strconv.FormatInt(made.generation, 10))
	return true
}

type content struct {
	Key          string
	LastModified string
	ETag         string
	Size         int
}

type prefix struct{ Prefix string }

type listed struct {
	XMLName               xml.Name `xml:"ListBucketResult"`
	Contents              []content
	CommonPrefixes        []prefix
	IsTruncated           bool
	NextContinuationToken string `xml:",omitempty"`
}

func (s *server) list(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	keys := make([]string, 0, len(s.objects))
	for key := range s.objects {
		keys = append(keys, key)
	}
	sort.Strings(keys)
	var found listed
	seen := ""
	for _, key := range keys {
		rest, ok := strings.CutPrefix(key, query.Get("prefix"))
		if !ok || key <= query.Get("continuation-token") {
			continue
		}
		if delimiter := query.Get("delimiter"); delimiter != "" {
			if before, _, ok := strings.Cut(rest, delimiter); ok {
				if shared := query.Get("prefix") + before + delimiter; shared != seen {
					seen = shared
					found.CommonPrefixes = append(found.CommonPrefixes, prefix{shared})
				}
				continue
			}
		}
		if len(found.Contents) == page {
			found.IsTruncated = true
			found.NextContinuationToken = found.Contents[page-1].Key
			break
		}
		there := s.objects[key]
		modified := there.modified.UTC().Format("2006-01-02T15:04:05.000Z")
		found.Contents = append(found.Contents, content{key, modified, there.etag(), len(there.content)})
	}
	answer(w, found)
}

type initiated struct {
	XMLName  xml.Name `xml:"InitiateMultipartUploadResult"`
	UploadId string
}

type completed struct {
	XMLName xml.Name `xml:"CompleteMultipartUploadResult"`
	ETag    string
}

func (s *server) complete(w http.ResponseWriter, r *http.Request, key, upload string, body []byte) {
	var order struct {
		Part []struct {
			PartNumber int
			ETag       string
		}
	}
	parts := s.uploads[upload]
	if err := xml.Unmarshal(body, &order); err != nil || parts == nil {
		fail(w, http.StatusBadRequest, "InvalidArgument")
		return
	}
	var whole []byte
	for _, part := range order.Part {
		if part.ETag != fmt.Sprintf("\"p%d\"", part.PartNumber) {
			fail(w, http.StatusBadRequest, "InvalidPart")
			return
		}
		whole = append(whole, parts[part.PartNumber]...)
	}
	delete(s.uploads, upload)
	if s.store(w, r, key, whole) {
		answer(w, completed{ETag: s.objects[key].etag()})
	}
}

func (s *server) get(w http.ResponseWriter, r *http.Request, key string) {
	there := s.objects[key]
	if there == nil {
		fail(w, http.StatusNotFound, "NoSuchKey")
		return
	}
	w.Header().Set("ETag", there.etag())
	w.Header().Set("x-goog-generation", strconv.FormatInt(there.generation, 10))
	w.Header().Set("Content-Type", "application/octet-stream")
	http.ServeContent(w, r, "", there.modified, bytes.NewReader(there.content))
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	s.lock.Lock()
	defer s.lock.Unlock()
	if s.token != "" && r.URL.Path == "/computeMetadata/v1/instance/service-accounts/default/token" {
		if r.Header.Get("Metadata-Flavor") != "Google" {
			fail(w, http.StatusForbidden, "Forbidden")
			return
		}
		fmt.Println("asked for a token")
		fmt.Fprintf(w, `{"access_token":%q,"expires_in":3600,"token_type":"Bearer"}`, s.token)
		return
	}
	if s.token != "" && r.Header.Get("Authorization") != "Bearer "+s.token {
		fail(w, http.StatusUnauthorized, "AuthenticationRequired")
		return
	}
	bucket, key, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	query := r.URL.Query()
	upload := query.Get("uploadId")
	switch {
	case bucket != "bucket":
		fail(w, http.StatusNotFound, "NoSuchBucket")
	case key == "":
		s.list(w, r)
	case r.Method == http.MethodPost && query.Has("uploads"):
		s.last++
		upload := strconv.FormatInt(s.last, 10)
		s.uploads[upload] = map[int][]byte{}
		answer(w, initiated{UploadId: upload})
	case r.Method == http.MethodPost:
		s.complete(w, r, key, upload, body)
	case r.Method == http.MethodPut && upload != "":
		number, err := strconv.Atoi(query.Get("partNumber"))
		if err != nil || s.uploads[upload] == nil {
			fail(w, http.StatusBadRequest, "InvalidArgument")
			return
		}
		s.uploads[upload][number] = body
		w.Header().Set("ETag", fmt.Sprintf("\"p%d\"", number))
	case r.Method == http.MethodPut:
		s.store(w, r, key, body)
	case r.Method == http.MethodDelete && upload != "":
		delete(s.uploads, upload)
		w.WriteHeader(http.StatusNoContent)
	case r.Method == http.MethodDelete && s.objects[key] == nil:
		fail(w, http.StatusNotFound, "NoSuchKey")
	case r.Method == http.MethodDelete:
		delete(s.objects, key)
		w.WriteHeader(http.StatusNoContent)
	default:
		s.get(w, r, key)
	}
}

func main() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(listener.Addr())
	double := &server{objects: map[string]*object{}, uploads: map[string]map[int][]byte{}}
	if len(os.Args) > 1 {
		double.token = os.Args[1]
	}
	log.Fatal(http.Serve(listener, double))
}
