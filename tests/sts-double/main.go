// A double of AWS STS, as the clients of the shared tier call it with a web identity, before a real
// S3 server: https://docs.aws.amazon.com/STS/latest/APIReference/API_AssumeRoleWithWebIdentity.html
//
// It accepts the token that is in a file. The first credentials that it gives are over at once, and
// the file then has another token: only that one is accepted from there on. It passes requests for
// objects to the server if they have a session's token, and were signed with the key that it gave.
// The server knows no sessions, so the double signs them again without the token.
//
//	sts-double TOKEN-FILE ROLE STORAGE CA-FILE
//
// It writes its authority's certificate into CA-FILE. It prints its address, and a line for each
// exchange.
package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

type server struct {
	tokenFile, role string
	storage         http.Handler
	lock            sync.Mutex
	exchanges       int
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// STS and S3 tell errors in different documents.
func fail(w http.ResponseWriter, code, document string) {
	w.Header().Set("Content-Type", "text/xml")
	w.WriteHeader(http.StatusForbidden)
	fmt.Fprintf(w, document, code)
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/" && r.URL.Query().Has("Action") {
		s.exchange(w, r.URL.Query())
		return
	}
	if !isOfSession(r) {
		fmt.Println("a request without a session:", r.Method, r.URL.Path)
		fail(w, "AccessDenied", "<Error><Code>%s</Code></Error>")
		return
	}
	s.storage.ServeHTTP(w, r)
}

var authorization = regexp.MustCompile(
	`^AWS4-HMAC-SHA256 Credential=([^/]+)/(.+), SignedHeaders=([^,]+), Signature=([0-9a-f]+)$`)

// Whether the request is of a session and was signed with its key. It is signed without the session
// then.
func isOfSession(r *http.Request) bool {
	const token = "x-amz-security-token"
	parts := authorization.FindStringSubmatch(r.Header.Get("Authorization"))
	if parts == nil || parts[1] != os.Getenv("ROOT_ACCESS_KEY") {
		return false
	}
	scope, headers := parts[2], strings.Split(parts[3], ";")
	isSigned := slices.Contains(headers, token) && parts[4] == signature(r, scope, headers)
	if !isSigned || !strings.HasPrefix(r.Header.Get(token), "session-canary-") {
		return false
	}
	r.Header.Del(token)
	headers = slices.DeleteFunc(headers, func(name string) bool { return name == token })
	r.Header.Set("Authorization", fmt.Sprintf(
		"AWS4-HMAC-SHA256 Credential=%s/%s, SignedHeaders=%s, Signature=%s",
		parts[1], scope, strings.Join(headers, ";"), signature(r, scope, headers)))
	return true
}

// https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
func signature(r *http.Request, scope string, headers []string) string {
	query := strings.Split(r.URL.RawQuery, "&")
	for place, pair := range query {
		if pair != "" && !strings.Contains(pair, "=") {
			query[place] += "="
		}
	}
	slices.Sort(query)
	lines := []string{r.Method, r.URL.EscapedPath(), strings.Join(query, "&")}
	for _, name := range headers {
		value := r.Header.Get(name)
		switch name {
		case "host":
			value = r.Host
		case "content-length":
			value = fmt.Sprint(r.ContentLength)
		}
		lines = append(lines, name+":"+strings.TrimSpace(value))
	}
	lines = append(lines, "", strings.Join(headers, ";"), r.Header.Get("X-Amz-Content-Sha256"))
	request := sha256.Sum256([]byte(strings.Join(lines, "\n")))
	text := strings.Join([]string{"AWS4-HMAC-SHA256", r.Header.Get("X-Amz-Date"), scope,
		hex.EncodeToString(request[:])}, "\n")
	key := []byte("AWS4" + os.Getenv("ROOT_SECRET_KEY"))
	for _, part := range append(strings.Split(scope, "/"), text) {
		mac := hmac.New(sha256.New, key)
		mac.Write([]byte(part))
		key = mac.Sum(nil)
	}
	return hex.EncodeToString(key)
}

func (s *server) exchange(w http.ResponseWriter, query url.Values) {
	s.lock.Lock()
	defer s.lock.Unlock()
	const refusal = `<ErrorResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><Error>
<Type>Sender</Type><Code>%s</Code><Message>Not allowed</Message></Error></ErrorResponse>`
	token, err := os.ReadFile(s.tokenFile)
	check(err)
	asked := query.Get("Action") == "AssumeRoleWithWebIdentity" && query.Get("Version") == "2011-06-15"
	switch {
	case !asked || query.Get("RoleSessionName") == "" || query.Get("RoleArn") != s.role:
		fmt.Println("refused: another role")
		fail(w, "AccessDenied", refusal)
		return
	case query.Get("WebIdentityToken") != string(token):
		fmt.Println("refused: another token")
		fail(w, "ExpiredTokenException", refusal)
		return
	}
	s.exchanges++
	until := time.Now().Add(time.Hour)
	if s.exchanges == 1 {
		until = time.Now()
		// As kubelet does: a reader finds one token or the other.
		check(os.WriteFile(s.tokenFile+".new", append(token, "-rotated"...), 0o600))
		check(os.Rename(s.tokenFile+".new", s.tokenFile))
	}
	fmt.Println("exchanged:", strings.TrimPrefix(string(token), "token-canary"))
	w.Header().Set("Content-Type", "text/xml")
	fmt.Fprintf(w, `<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult>
<SubjectFromWebIdentityToken>system:serviceaccount:baggageclaim:baggageclaim-node</SubjectFromWebIdentityToken>
<Audience>sts.amazonaws.com</Audience>
<AssumedRoleUser><Arn>%s</Arn><AssumedRoleId>AROA:session</AssumedRoleId></AssumedRoleUser>
<Credentials><SessionToken>session-canary-%d</SessionToken><SecretAccessKey>%s</SecretAccessKey>
<Expiration>%s</Expiration><AccessKeyId>%s</AccessKeyId></Credentials>
<Provider>https://kubernetes.default.svc</Provider>
</AssumeRoleWithWebIdentityResult>
<ResponseMetadata><RequestId>1</RequestId></ResponseMetadata>
</AssumeRoleWithWebIdentityResponse>`, s.role, s.exchanges, os.Getenv("ROOT_SECRET_KEY"),
		until.UTC().Format(time.RFC3339), os.Getenv("ROOT_ACCESS_KEY"))
}

// A certificate for this address, and the authority that signed it.
func certificate() (tls.Certificate, []byte) {
	make := func(template, parent *x509.Certificate, signer *ecdsa.PrivateKey) ([]byte, *ecdsa.PrivateKey) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		check(err)
		if signer == nil {
			signer = key
		}
		template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(24*time.Hour)
		der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
		check(err)
		return der, key
	}
	authority := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"},
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	ca, signer := make(authority, authority, nil)
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, key := make(leaf, authority, signer)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key},
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca})
}

func main() {
	storage, err := url.Parse(os.Args[3])
	check(err)
	// The host stays as it is: the signature covers it.
	proxy := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(storage)
		r.Out.Host = r.In.Host
	}}
	own, authority := certificate()
	check(os.WriteFile(os.Args[4], authority, 0o600))
	listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{own}})
	check(err)
	fmt.Printf("https://%s\n", listener.Addr())
	log.Fatal(http.Serve(listener, &server{tokenFile: os.Args[1], role: os.Args[2], storage: proxy}))
}
