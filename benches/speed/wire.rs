//! A minimal caller: gRPC as bytes on a persistent connection, written and read by this thread.
//!
//! It measures the driver and its socket only. A client library's work differs in every language,
//! and does not count. (tonic's takes as long as the driver's for an empty call, and wakes the
//! driver twice for each.) So the request is encoded before the clock starts, and is sent in one
//! piece. The clock stops at the last frame of the answer.
//!
//! Just enough of HTTP/2 (RFC 9113) and HPACK (RFC 7541) for one call at a time. The driver's log
//! has the errors.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use prost::Message;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;

/// A setting: how many bytes of an answer may come before the client allows more.
const INITIAL_WINDOW_SIZE: u16 = 4;

/// A flag of SETTINGS and PING.
const ACK: u8 = 1;
/// Flags of DATA and HEADERS.
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// A frame's header: its length (3 bytes), kind, flags, stream (4 bytes).
const HEAD: usize = 9;

/// A message's header: whether it is compressed, and its length.
const PREFIX: usize = 5;

/// A connection to the driver.
#[derive(Debug)]
pub struct Wire {
    stream: UnixStream,
    next_stream: u32,
    read: Vec<u8>,
}

impl Wire {
    /// Connects, and sends the client preface.
    pub fn connect(socket: &Path) -> Self {
        let mut stream = UnixStream::connect(socket).expect("the driver's socket");
        let mut hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        // Window sizes for any answer, and for all answers of the connection.
        let room = (1_u32 << 30).to_be_bytes();
        let mut settings = INITIAL_WINDOW_SIZE.to_be_bytes().to_vec();
        settings.extend_from_slice(&room);
        frame(&mut hello, SETTINGS, 0, 0, &settings);
        frame(&mut hello, WINDOW_UPDATE, 0, 0, &room);
        stream.write_all(&hello).expect("the driver listens");
        Self {
            stream,
            next_stream: 1,
            read: Vec::new(),
        }
    }

    /// Calls a method by its full name, `/package.Service/Method`; how long it took. Any error ends
    /// the bench.
    pub fn call<Answer: Message + Default>(
        &mut self,
        method: &str,
        request: &impl Message,
    ) -> (Answer, Duration) {
        let stream = self.next_stream;
        self.next_stream += 2;
        let bytes = encode(stream, method, request);
        let began = Instant::now();
        self.stream.write_all(&bytes).expect("the driver listens");
        let answer = self.answer(stream);
        let took = began.elapsed();
        let answer = answer.unwrap_or_else(|| panic!("{method} failed; the driver's log says why"));
        let answer = Answer::decode(answer.as_slice()).expect("an answer of this method");
        (answer, took)
    }

    /// Reads to the end of a stream; `None` if it had no message.
    fn answer(&mut self, stream: u32) -> Option<Vec<u8>> {
        let mut data = Vec::new();
        loop {
            let (kind, flags, of, payload) = self.frame();
            match kind {
                SETTINGS | PING if flags & ACK == 0 => {
                    let mut ack = Vec::new();
                    let echoed: &[u8] = if kind == PING { &payload } else { &[] };
                    frame(&mut ack, kind, ACK, 0, echoed);
                    self.stream.write_all(&ack).expect("the driver listens");
                }
                DATA if of == stream => data.extend_from_slice(&payload),
                RST_STREAM | GOAWAY => return None,
                _ => {}
            }
            if of == stream && matches!(kind, DATA | HEADERS) && flags & END_STREAM != 0 {
                return data.get(PREFIX..).map(<[u8]>::to_vec);
            }
        }
    }

    fn frame(&mut self) -> (u8, u8, u32, Vec<u8>) {
        loop {
            if let Some((head, rest)) = self.read.split_first_chunk::<HEAD>() {
                let [a, b, c, kind, flags, stream @ ..] = *head;
                let length = u32::from_be_bytes([0, a, b, c]) as usize;
                if let Some(payload) = rest.get(..length) {
                    let payload = payload.to_vec();
                    self.read.drain(..HEAD + length);
                    return (kind, flags, u32::from_be_bytes(stream), payload);
                }
            }
            let mut block = [0; 1 << 14];
            let count = self.stream.read(&mut block).expect("the driver answers");
            assert_ne!(count, 0, "the driver ended the connection");
            self.read.extend_from_slice(&block[..count]);
        }
    }
}

/// A whole call: its headers and its only message.
fn encode(stream: u32, method: &str, request: &impl Message) -> Vec<u8> {
    // From the static table: POST, http, and the names :authority, :path, content-type.
    let mut fields = vec![0x83, 0x86];
    literal(&mut fields, &[0x01], "localhost");
    literal(&mut fields, &[0x04], method);
    literal(&mut fields, &[0x0f, 0x10], "application/grpc");
    for (name, value) in [("te", "trailers"), ("grpc-timeout", "120S")] {
        fields.push(0);
        text(&mut fields, name);
        text(&mut fields, value);
    }
    let message = request.encode_to_vec();
    let mut body = vec![0];
    let length = u32::try_from(message.len()).expect("a short message");
    body.extend_from_slice(&length.to_be_bytes());
    body.extend_from_slice(&message);
    let mut bytes = Vec::new();
    frame(&mut bytes, HEADERS, END_HEADERS, stream, &fields);
    frame(&mut bytes, DATA, END_STREAM, stream, &body);
    bytes
}

/// A literal field without indexing; its name is from the static table.
fn literal(fields: &mut Vec<u8>, name: &[u8], value: &str) {
    fields.extend_from_slice(name);
    text(fields, value);
}

/// A plain string with a length of at most seven bits.
fn text(fields: &mut Vec<u8>, text: &str) {
    assert!(text.len() < 127, "a short text");
    fields.push(u8::try_from(text.len()).expect("it is short"));
    fields.extend_from_slice(text.as_bytes());
}

fn frame(bytes: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len()).expect("a short frame");
    assert!(length < 1 << 14, "no longer than any receiver takes");
    bytes.extend_from_slice(&length.to_be_bytes()[1..]);
    bytes.extend_from_slice(&[kind, flags]);
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(payload);
}
