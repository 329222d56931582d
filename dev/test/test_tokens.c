// Tests of data/tokens.h and data/tokenizer.h: random files against an independent reading of them, and every kind of
// damage against the message it must give. Run from the repository root: test_tokens [seed]
#include "../../data/tokens.h"
#include "../../data/tokenizer.h"
#include <time.h>

static int passed, failed;
static uint64_t rng;
static char dir[64] = "/tmp/test_tokens_XXXXXX";
static char err[1024];

// Counts and prints one check; why (may be empty) is shown when it fails.
static void check(int ok, const char *name, const char *why) {
    if (ok) { passed++; printf("ok %s\n", name); }
    else { failed++; printf("FAIL %s: %s\n", name, *why ? why : "wrong result"); }
}

// Checks that rc is -1 and err is one line that contains each of the words a and b.
static void check_error(int64_t rc, const char *name, const char *a, const char *b) {
    char why[1400];
    snprintf(why, sizeof why, "rc %d, expected -1 and '%s' and '%s' in: %s", (int)rc, a, b, err);
    check(rc == -1 && strstr(err, a) && strstr(err, b) && !strchr(err, '\n'), name, why);
    err[0] = 0;
}

// xorshift64*: a random integer in [0, n).
static int64_t below(int64_t n) {
    rng ^= rng >> 12; rng ^= rng << 25; rng ^= rng >> 27;
    return (int64_t)((rng * 2685821657736338717ULL >> 16) % (uint64_t)n);
}

// The path of name in the temporary folder; the last 8 results stay valid.
static const char *in_dir(const char *name) {
    static char buf[8][256];
    static int next;
    char *p = buf[next++ % 8];
    snprintf(p, sizeof buf[0], "%s/%s", dir, name);
    return p;
}

// Exits when the test itself cannot go on (disk full and the like): no verdict about the code.
static void must(int ok, const char *what) {
    if (!ok) { fprintf(stderr, "test_tokens: %s: %s\n", what, strerror(errno)); exit(2); }
}

// Writes n bytes to name in the temporary folder and returns its path.
static const char *put(const char *name, const void *bytes, size_t n) {
    const char *path = in_dir(name);
    FILE *f = fopen(path, "wb");
    must(f && fwrite(bytes, 1, n, f) == n && !fclose(f), path);
    return path;
}

// Reads the whole of path; the caller frees it.
static uint8_t *slurp(const char *path, size_t *n) {
    struct stat st;
    FILE *f = fopen(path, "rb");
    must(f && !fstat(fileno(f), &st), path);
    *n = (size_t)st.st_size;
    uint8_t *p = (uint8_t *)malloc(*n + 1);
    must(p && fread(p, 1, *n, f) == *n, path);
    fclose(f);
    return p;
}

// Removes path and all below it, following no links.
static void remove_tree(const char *path) {
    struct stat st;
    if (!lstat(path, &st) && S_ISDIR(st.st_mode)) {
        DIR *d = opendir(path);
        must(d != NULL, path);
        for (struct dirent *e; (e = readdir(d)); ) {
            char sub[512];
            if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
            snprintf(sub, sizeof sub, "%s/%s", path, e->d_name);
            remove_tree(sub);
        }
        closedir(d);
    }
    must(!remove(path), path);
}

// How many file descriptors are open.
static int open_fds(void) {
    int n = 0;
    for (int fd = 0; fd < 1024; fd++) n += fcntl(fd, F_GETFD) != -1;
    return n;
}

// Makes the 1024-byte header of a token file from its first five integers, each byte placed by hand.
static void header(uint8_t *p, uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t e) {
    uint32_t h[5];
    h[0] = a; h[1] = b; h[2] = c; h[3] = d; h[4] = e;
    memset(p, 0, 1024);
    for (int i = 0; i < 20; i++) p[i] = (uint8_t)(h[i / 4] >> 8 * (i % 4));
}

// Opens spec expecting failure, and a zeroed stream with it.
static void bad_open(const char *name, const char *spec, const char *exclude, const char *a, const char *b) {
    TokenStream s;
    int rc = tokens_open(&s, spec, exclude, err, sizeof err);
    check_error(rc, name, a, b);
    if (!rc) tokens_close(&s);
    else check(!s.files && !s.n_files && !s.n_tokens, name, "the stream is not zero after a failure");
}

// 1 if reads of the whole stream, of single tokens at all file edges and of random ranges equal want (n).
static int same_reads(const TokenStream *s, const int32_t *want, int64_t n) {
    int32_t *got = (int32_t *)malloc((size_t)(n + 1) * sizeof *got);
    must(got != NULL, "malloc");
    int ok = s->n_tokens == n && !tokens_read(s, 0, n, got, err, sizeof err) && !memcmp(got, want, (size_t)n * 4);
    for (int i = 0; ok && i < s->n_files; i++) {
        int64_t a = s->files[i].first, b = a + s->files[i].n_tokens - 1;
        ok = !tokens_read(s, a, 1, got, err, sizeof err) && got[0] == want[a]
          && !tokens_read(s, b, 1, got, err, sizeof err) && got[0] == want[b];
        if (ok && i) ok = !tokens_read(s, a - 1, 2, got, err, sizeof err) && !memcmp(got, want + a - 1, 8);
    }
    for (int i = 0; ok && i < 500; i++) {
        int64_t a = below(n + 1), m = below(n - a + 1);
        got[m] = -7;                // must stay: a read never writes past its end
        ok = !tokens_read(s, a, m, got, err, sizeof err) && !memcmp(got, want + a, (size_t)m * 4) && got[m] == -7;
    }
    free(got);
    return ok;
}

// Text folders: content, exclusion, and every spec that must be refused.
static void test_text(void) {
    // Three files of random bytes, created out of order; other names, hidden files and subfolders do not count.
    must(!mkdir(in_dir("text"), 0700) && !mkdir(in_dir("text/sub.txt"), 0700), "mkdir");
    static const char *const names[3] = { "text/B.txt", "text/a.txt", "text/a1.txt" };     // in byte order
    static uint8_t bytes[3][5000];
    static int32_t want[15003];
    int64_t n = 0;
    size_t size[3];
    for (int i = 0; i < 3; i++) {
        size[i] = (size_t)(i == 1 ? 1 : 1 + below(5000));
        want[n++] = 256;
        for (size_t j = 0; j < size[i]; j++) want[n++] = bytes[i][j] = (uint8_t)below(256);
    }
    for (int i = 2; i >= 0; i--) put(names[i], bytes[i], size[i]);
    put("text/notes.md", "x", 1);
    put("text/z.bin", "x", 1);
    put("text/.hidden.txt", "x", 1);

    TokenStream s;
    char spec[512];
    int ok = !tokens_open(&s, in_dir("text"), NULL, err, sizeof err);
    check(ok && s.n_files == 3 && s.kind == TOKENS_TEXT && s.vocab == 257 && s.eot == 256 && same_reads(&s, want, n), "text folder", err);
    if (ok) {
        int32_t t[2];
        char num[32];
        snprintf(num, sizeof num, " %" PRId64 " tokens", n);
        check_error(tokens_read(&s, n - 1, 2, t, err, sizeof err), "read past the end", num, "2 tokens from");
        check_error(tokens_read(&s, -1, 1, t, err, sizeof err), "read before the start", num, "from -1");
        check_error(tokens_read(&s, 0, -1, t, err, sizeof err), "read of negative length", num, "-1 tokens");
        check_error(tokens_read(&s, INT64_MAX, INT64_MAX, t, err, sizeof err), "read that would overflow", num, "9223372036854775807");
        check(!tokens_read(&s, n, 0, t, err, sizeof err), "empty read at the end", err);
        tokens_close(&s);
        tokens_close(&s);
        check(!tokens_read(&s, 0, 0, t, err, sizeof err) && tokens_read(&s, 0, 1, t, err, sizeof err) == -1, "closed stream", err);
    }
    snprintf(spec, sizeof spec, "%s/", in_dir("text"));
    ok = !tokens_open(&s, spec, "", err, sizeof err);
    check(ok && same_reads(&s, want, n) && !strstr(s.files[0].path, "//"), "folder with a slash", err);
    if (ok) tokens_close(&s);

    // Excluded by name, by symbolic link, by hard link, by another spelling, by pattern: always the same file.
    must(!symlink(in_dir("text/a.txt"), in_dir("val_symlink")) && !link(in_dir("text/a.txt"), in_dir("val_hardlink")), "link");
    static const char *const val[5] = { "text/a.txt", "val_symlink", "val_hardlink", "text/../text/./a.txt", "text/[a].*" };
    memmove(want + size[0] + 1, want + size[0] + 1 + 2, (size_t)(n - (int64_t)size[0] - 3) * 4);
    n -= 2;
    for (int i = 0; i < 5; i++) {
        char name[64];
        snprintf(name, sizeof name, "excluded as %s", val[i]);
        ok = !tokens_open(&s, in_dir("text"), in_dir(val[i]), err, sizeof err);
        check(ok && s.n_files == 2 && same_reads(&s, want, n), name, err);
        if (ok) tokens_close(&s);
    }
    must(!symlink("a.txt", in_dir("text/link.txt")), "symlink");
    ok = !tokens_open(&s, in_dir("text"), in_dir("text/a.txt"), err, sizeof err);
    check(ok && same_reads(&s, want, n), "excluded under both its names", err);
    if (ok) tokens_close(&s);
    bad_open("same file by a symbolic link", in_dir("text"), NULL, "link.txt", "same file as");
    must(!unlink(in_dir("text/link.txt")), "unlink");

    snprintf(spec, sizeof spec, "%s,%s", in_dir("text/B.txt"), in_dir("text/B.txt"));
    bad_open("duplicate file", spec, NULL, "B.txt", "same file as");
    snprintf(spec, sizeof spec, "%s,%s", in_dir("text"), in_dir("text/B.txt"));
    bad_open("duplicate of a folder's file", spec, NULL, "B.txt", "same file as");
    bad_open("all excluded", in_dir("text"), in_dir("text"), "at least 1 file", "found 0 of 3");
    bad_open("excluded file missing", in_dir("text"), in_dir("nowhere.txt"), "nowhere.txt", "No such file");
    bad_open("missing file", in_dir("nowhere.txt"), NULL, "nowhere.txt", "No such file");
    bad_open("glob without match", in_dir("text/*.nothing"), NULL, "*.nothing", "found 0");
    bad_open("empty spec", "", NULL, "empty name", "byte 0");
    bad_open("null spec", NULL, NULL, "empty name", "byte 0");
    snprintf(spec, sizeof spec, "%s,", in_dir("text/B.txt"));
    bad_open("empty last name", spec, NULL, "empty name", "byte ");
    must(!mkdir(in_dir("empty"), 0700), "mkdir");
    bad_open("empty folder", in_dir("empty"), NULL, "/empty", "found none");
    bad_open("empty text", put("empty.txt", "", 0), NULL, "at least 1 byte", "found 0 bytes");
    bad_open("device", "/dev/null", NULL, "/dev/null", "regular file");
}

// Version 1 and 7 shards: round trip, order, exclusion, the bytes on disk, mixed kinds.
static void test_shards(void) {
    static int32_t want[20000], keep[20000];
    char name[64], spec[512];
    must(!mkdir(in_dir("v1"), 0700) && !mkdir(in_dir("v7"), 0700), "mkdir");
    for (int wide = 0; wide < 2; wide++) {
        int vocab = wide ? 65537 + (int)below(INT32_MAX - 65537) : 1 + (int)below(65536), eot = (int)below(vocab);
        int64_t n = 0, size[6];
        int ok = 1;
        for (int i = 0; i < 6; i++) {
            size[i] = i == 2 ? 1 : 1 + below(3000);
            for (int64_t j = 0; j < size[i]; j++) want[n + j] = (int32_t)below(vocab);
            if (!i) { want[0] = vocab - 1; want[size[0] - 1] = vocab - 1; }
            snprintf(name, sizeof name, "v%d/shard_%06d.bin", wide ? 7 : 1, i);
            ok = ok && !tokens_write(in_dir(name), want + n, size[i], vocab, eot, err, sizeof err);
            n += size[i];
        }
        TokenStream s;
        snprintf(name, sizeof name, "v%d shards by glob", wide ? 7 : 1);
        snprintf(spec, sizeof spec, "%s/v%d/shard_*.bin", dir, wide ? 7 : 1);
        ok = ok && !tokens_open(&s, spec, NULL, err, sizeof err);
        check(ok && s.n_files == 6 && s.vocab == vocab && s.eot == eot && s.kind == (wide ? TOKENS_U32 : TOKENS_U16)
              && same_reads(&s, want, n), name, err);
        if (ok) tokens_close(&s);
        snprintf(name, sizeof name, "v%d folder of .bin", wide ? 7 : 1);
        snprintf(spec, sizeof spec, "%s/v%d", dir, wide ? 7 : 1);
        ok = !tokens_open(&s, spec, NULL, err, sizeof err);
        check(ok && s.n_files == 6 && same_reads(&s, want, n), name, err);
        if (ok) tokens_close(&s);

        // The order of the spec is the order of the stream, and an excluded shard leaves it.
        int64_t k = 0, at0 = size[0] + size[1] + size[2] + size[3];
        memcpy(keep, want + at0, (size_t)size[4] * 4);
        k += size[4];
        memcpy(keep + k, want, (size_t)size[0] * 4);
        k += size[0];
        char out[512];
        snprintf(spec, sizeof spec, "%s/v%d/*4.bin,%s/v%d/shard_00000[01].bin", dir, wide ? 7 : 1, dir, wide ? 7 : 1);
        snprintf(out, sizeof out, "%s/v%d/*1.bin", dir, wide ? 7 : 1);
        snprintf(name, sizeof name, "v%d list of globs with exclusion", wide ? 7 : 1);
        ok = !tokens_open(&s, spec, out, err, sizeof err);
        check(ok && s.n_files == 2 && same_reads(&s, keep, k), name, err);
        if (ok) tokens_close(&s);

        // The bytes on disk, by the format's own words.
        size_t bytes;
        snprintf(name, sizeof name, "v%d/shard_000000.bin", wide ? 7 : 1);
        uint8_t *p = slurp(in_dir(name), &bytes), h[1024];
        header(h, wide ? 20240801 : 20240520, wide ? 7 : 1, (uint32_t)size[0], (uint32_t)vocab, (uint32_t)eot);
        snprintf(name, sizeof name, "v%d bytes on disk", wide ? 7 : 1);
        check(bytes == 1024 + (size_t)size[0] * (wide ? 4 : 2) && !memcmp(p, h, 1024)
              && p[1024] == ((vocab - 1) & 255) && p[1025] == ((vocab - 1) >> 8 & 255)
              && (!wide || (p[1026] == ((vocab - 1) >> 16 & 255) && p[1027] == (vocab - 1) >> 24)), name, "");
        free(p);
    }
    snprintf(spec, sizeof spec, "%s,%s", in_dir("v1"), in_dir("v7"));
    bad_open("mixed uint16 and uint32", spec, NULL, "uint16 tokens", "found uint32 tokens");
    snprintf(spec, sizeof spec, "%s,%s", in_dir("text"), in_dir("v1"));
    bad_open("mixed text and .bin", spec, NULL, "expected text, vocab 257", "found uint16 tokens");
}

// Damaged .bin files and refused writes, each with its numbers in the message.
static void test_bad_bins(void) {
    int32_t t[4] = { 1, 2, 3, 9 };
    char spec[512], name[64], num[64];
    uint8_t b[1100];
    for (int wide = 0; wide < 2; wide++) {
        // 10 random tokens in a file of exactly 1024+20 or 1024+40 bytes, cut everywhere around its edges.
        int n = 10, full = 1024 + n * (wide ? 4 : 2);
        uint32_t magic = wide ? 20240801 : 20240520, version = wide ? 7 : 1;
        header(b, magic, version, (uint32_t)n, 0, 12345);       // header[4] does not count without header[3]
        for (int i = 1024; i < full; i++) b[i] = (uint8_t)(wide && i % 4 > 1 ? 0 : below(128));
        TokenStream s;
        int ok = !tokens_open(&s, put("ok.bin", b, (size_t)full), NULL, err, sizeof err);
        snprintf(name, sizeof name, "v%d default vocab", (int)version);
        check(ok && s.vocab == (wide ? 128256 : 50257) && s.eot == (wide ? 128000 : 50256) && s.n_tokens == n, name, err);
        if (ok) tokens_close(&s);
        int cuts[7] = { 0, 1, 1023, 1024, 0, full - 1, full + 1 };
        cuts[4] = 1025 + (int)below(full - 1026);
        for (int i = 0; i < 7; i++) {
            char want[64];
            b[full] = 0;
            snprintf(name, sizeof name, "v%d of %d bytes, not %d", (int)version, cuts[i], full);
            snprintf(want, sizeof want, cuts[i] < 1024 ? "header of 1024 bytes" : "expected %d bytes for 10 tokens", full);
            snprintf(num, sizeof num, cuts[i] < 1024 ? "file of %d bytes" : "found %d", cuts[i]);
            bad_open(name, put("cut.bin", b, (size_t)cuts[i]), NULL, want, num);
        }
        header(b, magic, version + 1, (uint32_t)n, 0, 0);
        snprintf(name, sizeof name, "v%d wrong version", (int)version);
        snprintf(num, sizeof num, "expected version %d", (int)version);
        snprintf(spec, sizeof spec, "found %d", (int)version + 1);
        bad_open(name, put("version.bin", b, (size_t)full), NULL, num, spec);
        header(b, magic, version, 0x80000001u, 0, 0);
        snprintf(name, sizeof name, "v%d negative count", (int)version);
        bad_open(name, put("negative.bin", b, (size_t)full), NULL, "at least 1", "found -2147483647");
        header(b, magic, version, 0x7fffffffu, 0, 0);
        snprintf(name, sizeof name, "v%d huge count", (int)version);
        bad_open(name, put("huge.bin", b, (size_t)full), NULL, wide ? "expected 8589935612 bytes" : "expected 4294968318 bytes",
                 "found 10");
        header(b, magic, version, 0, 0, 0);
        snprintf(name, sizeof name, "v%d without tokens", (int)version);
        bad_open(name, put("none.bin", b, 1024), NULL, "at least 1", "found 0");
        header(b, magic, version, (uint32_t)n, 100, 100);
        snprintf(name, sizeof name, "v%d eot not below vocab", (int)version);
        bad_open(name, put("eot.bin", b, (size_t)full), NULL, "eot 100", "vocab 100");
        header(b, magic, version, (uint32_t)n, 0xffffffffu, 0);
        snprintf(name, sizeof name, "v%d negative vocab", (int)version);
        bad_open(name, put("vocab.bin", b, (size_t)full), NULL, "eot < vocab", "vocab -1");

        // One id too large, at a place known by hand: tokens before and after it still read.
        int bad = 1 + (int)below(n - 2), bytes = wide ? 4 : 2;
        header(b, magic, version, (uint32_t)n, 128, 0);
        b[1024 + bytes * bad] = 128;
        for (int i = 1; i < bytes; i++) for (int j = 0; j < n; j++) b[1024 + bytes * j + i] = 0;
        int32_t out[10];
        ok = !tokens_open(&s, put("id.bin", b, (size_t)full), NULL, err, sizeof err);
        snprintf(name, sizeof name, "v%d id not below vocab", (int)version);
        snprintf(num, sizeof num, "found 128 at byte %d", 1024 + bytes * bad);
        if (ok) check_error(tokens_read(&s, 0, n, out, err, sizeof err), name, "below 128", num);
        check(ok && !tokens_read(&s, 0, bad, out, err, sizeof err)
              && !tokens_read(&s, bad + 1, n - bad - 1, out, err, sizeof err), name, err);
        if (ok) tokens_close(&s);
        if (wide) {                 // an id that is negative as an int32
            b[1024 + bytes * bad + 3] = 0xff;
            ok = !tokens_open(&s, put("id.bin", b, (size_t)full), NULL, err, sizeof err);
            check_error(ok ? tokens_read(&s, 0, n, out, err, sizeof err) : 0, "v7 id with its top bit set", "below 128",
                        "found 4278190208");
            if (ok) tokens_close(&s);
        }
    }
    header(b, 20240521, 1, 10, 0, 0);
    bad_open("wrong magic", put("magic.bin", b, 1044), NULL, "starts with the int32 magic 20240520 (uint16 tokens) or 20240801",
             "found 20240521");

    must(!tokens_write(in_dir("d1.bin"), t, 4, 10, 0, err, sizeof err) && !tokens_write(in_dir("d2.bin"), t, 4, 11, 0, err, sizeof err)
         && !tokens_write(in_dir("d3.bin"), t, 4, 10, 1, err, sizeof err), "tokens_write");
    snprintf(spec, sizeof spec, "%s/d1.bin,%s/d2.bin", dir, dir);
    bad_open("disagreeing vocab", spec, NULL, "vocab 10, eot 0 as in", "found uint16 tokens, vocab 11");
    snprintf(spec, sizeof spec, "%s/d1.bin,%s/d3.bin", dir, dir);
    bad_open("disagreeing eot", spec, NULL, "vocab 10, eot 0 as in", "vocab 10, eot 1");

    check_error(tokens_write(in_dir("w.bin"), t, 4, 9, 0, err, sizeof err), "write of an id not below vocab", "0 to 8",
                "found 9 at index 3");
    check_error(tokens_write(in_dir("w.bin"), t, (int64_t)1 << 31, 10, 0, err, sizeof err), "write of 2^31 tokens",
                "2147483647", "found 2147483648");
    check_error(tokens_write(in_dir("w.bin"), t, 0, 10, 0, err, sizeof err), "write of no tokens", "1 to", "found 0");
    check_error(tokens_write(in_dir("w.bin"), t, 4, 10, 10, err, sizeof err), "write of an eot not below vocab", "eot 10", "vocab 10");
    check_error(tokens_write(in_dir("no/w.bin"), t, 4, 10, 0, err, sizeof err), "write into a missing folder", "no/w.bin",
                "No such file");
    must(!mkdir(in_dir("taken.bin"), 0700), "mkdir");
    check_error(tokens_write(in_dir("taken.bin"), t, 4, 10, 0, err, sizeof err), "write over a folder", "taken.bin", "cannot write");
    glob_t g;
    snprintf(spec, sizeof spec, "%s/*.tmp*", dir);
    check(access(in_dir("w.bin"), F_OK) && glob(spec, 0, NULL, &g) == GLOB_NOMATCH, "failed writes leave nothing", "a file was left");
    char tiny[8];
    TokenStream s;
    check(tokens_open(&s, in_dir("magic.bin"), NULL, tiny, sizeof tiny) == -1 && strlen(tiny) == 7
          && tokens_open(&s, in_dir("magic.bin"), NULL, NULL, 0) == -1, "short and absent err", "");
}

// The data set of the repository, with its validation file held out.
static void test_austen(void) {
    TokenStream s;
    static int32_t a[4096];
    int ok = !tokens_open(&s, "data/austen", "data/austen/persuasion.txt", err, sizeof err);
    check(ok && s.n_files == 5 && s.n_tokens == 3558175 + 5, "data/austen without persuasion.txt", err);
    int64_t docs = 0;
    for (int64_t i = 0; ok && i < s.n_tokens; ) {
        int64_t m = s.n_tokens - i < 4096 ? s.n_tokens - i : 4096;
        ok = !tokens_read(&s, i, m, a, err, sizeof err);
        for (int64_t j = 0; j < m; j++) docs += a[j] == s.eot;
        i += m;
    }
    check(ok && docs == 5, "data/austen: one end of document a file", err);
    tokens_close(&s);
}

// Prints s through print_utf8_safe and compares with want.
static void check_utf8(const char *name, const char *s, size_t n, const char *want) {
    size_t got;
    FILE *f = fopen(in_dir("utf8"), "wb");
    must(f != NULL, "utf8");
    print_utf8_safe(f, s, n);
    fclose(f);
    uint8_t *p = slurp(in_dir("utf8"), &got);
    p[got] = 0;
    check(got == strlen(want) && !memcmp(p, want, got), name, (const char *)p);
    free(p);
}

// print_utf8_safe on valid and invalid sequences.
static void test_utf8(void) {
    check_utf8("utf8: plain", "a\tb\n~", 5, "a\tb\n~");
    check_utf8("utf8: valid of 2, 3 and 4 bytes", "\xc2\xa3\xe2\x82\xac\xf0\x9f\x98\x80\xf4\x8f\xbf\xbf", 13,
               "\xc2\xa3\xe2\x82\xac\xf0\x9f\x98\x80\xf4\x8f\xbf\xbf");
    check_utf8("utf8: control characters", "\0\x1b[31m\r\x7f", 8, "\\x00\\x1B[31m\\x0D\\x7F");
    check_utf8("utf8: C1 control characters", "\xc2\x80\xc2\x9b\xc2\xa0", 6, "\\xC2\\x80\\xC2\\x9B\xc2\xa0");
    check_utf8("utf8: lone continuation", "a\x80z\xbf", 4, "a\\x80z\\xBF");
    check_utf8("utf8: cut sequences", "\xe2\x82" "a\xc3", 4, "\\xE2\\x82a\\xC3");
    check_utf8("utf8: cut at the end of 4", "\xf0\x9f\x98", 3, "\\xF0\\x9F\\x98");
    check_utf8("utf8: overlong", "\xc0\xaf\xe0\x9f\xbf\xf0\x8f\xbf\xbf", 9, "\\xC0\\xAF\\xE0\\x9F\\xBF\\xF0\\x8F\\xBF\\xBF");
    check_utf8("utf8: surrogate", "\xed\xa0\x80\xed\x9f\xbf", 6, "\\xED\\xA0\\x80\xed\x9f\xbf");
    check_utf8("utf8: beyond U+10FFFF", "\xf4\x90\x80\x80\xf5\xff", 6, "\\xF4\\x90\\x80\\x80\\xF5\\xFF");
    check_utf8("utf8: bad byte then good", "\xff\xc3\xa9", 3, "\\xFF\xc3\xa9");
}

// Decodes n ids to out; returns the number of bytes, or -1 on a bad id.
static int64_t decode(const Tokenizer *t, const int32_t *id, int64_t n, char *out) {
    int64_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        const char *s;
        int len = tokenizer_decode(t, id[i], &s);
        if (len < 0) return -1;
        memcpy(out + at, s, (size_t)len);
        at += len;
    }
    return at;
}

// Both tokenizers, and damaged tokenizer.bin files.
static void test_tokenizer(void) {
    static char text[3000], back[3000];
    static int32_t ids[3000];
    static uint8_t b[400000];
    const char *s;
    Tokenizer t;
    for (int i = 0; i < 3000; i++) text[i] = (char)below(256);
    int ok = !tokenizer_bytes(&t);
    check(ok && t.bytes_mode && t.vocab == 257 && t.eot == 256 && tokenizer_encode(&t, text, 3000, ids, 3000) == 3000
          && decode(&t, ids, 3000, back) == 3000 && !memcmp(text, back, 3000), "bytes: round trip", "");
    for (int i = 0; i < 3000; i++) ok = ok && ids[i] == (uint8_t)text[i];
    check(ok, "bytes: ids are the bytes", "");
    check(tokenizer_encode(&t, text, 3000, ids, 2999) == -1 && tokenizer_encode(&t, text, 0, ids, 0) == 0, "bytes: room for the ids", "");
    check(tokenizer_decode(&t, 256, &s) == 13 && !strcmp(s, "<|endoftext|>") && tokenizer_decode(&t, 0, &s) == 1 && !*s
          && tokenizer_decode(&t, 257, &s) == -1 && tokenizer_decode(&t, -1, &s) == -1, "bytes: decode", "");
    tokenizer_free(&t);
    tokenizer_free(&t);

    // Version 2: all bytes but 'Q', random longer tokens, one of 255 bytes, and an eot text that must not be encoded.
    size_t n = 1024;
    int vocab = 0, eot = 0;
    for (int i = 0; i < 256; i++) if (i != 'Q') { b[n++] = 1; b[n++] = (uint8_t)i; vocab++; }
    int abc = vocab;
    for (int i = 0; i < 3; i++) { b[n++] = (uint8_t)(2 + i); memcpy(b + n, "abcd", 4); n += (size_t)(2 + i); vocab++; }
    eot = vocab++;
    b[n++] = 3; memcpy(b + n, "xyz", 3); n += 3;
    b[n++] = 255; memset(b + n, 'e', 255); n += 255; vocab++;
    for (int i = 0; i < 60; i++, vocab++) {
        int len = 2 + (int)below(3);
        b[n++] = (uint8_t)len;
        for (int j = 0; j < len; j++) b[n++] = (uint8_t)('m' + below(3));
    }
    header(b, 20240328, 2, (uint32_t)vocab, (uint32_t)eot, 0);
    ok = !tokenizer_open(&t, put("tok.bin", b, n), err, sizeof err);
    check(ok && !t.bytes_mode && t.vocab == vocab && t.eot == eot, "tokenizer.bin version 2", err);
    if (!ok) return;
    int64_t m;
    m = tokenizer_encode(&t, "abcdabcaba", 10, ids, 10);
    check(m == 4 && ids[0] == abc + 2 && ids[1] == abc + 1 && ids[2] == abc && ids[3] == 'a' - ('a' > 'Q'), "table: longest match", "");
    m = tokenizer_encode(&t, "xyz", 3, ids, 10);
    check(m == 3, "table: text never yields eot", "");
    check(tokenizer_encode(&t, "abQ", 3, ids, 10) == -1, "table: byte without token", "");
    check(tokenizer_encode(&t, "abcdx", 5, ids, 1) == -1 && tokenizer_encode(&t, "abcdx", 5, ids, 2) == 2, "table: room for the ids", "");
    check(tokenizer_decode(&t, eot, &s) == 13 && !strcmp(s, "<|endoftext|>") && tokenizer_decode(&t, vocab, &s) == -1
          && tokenizer_decode(&t, eot + 1, &s) == 255 && s[254] == 'e', "table: decode", "");
    int same = 1;
    for (int trial = 0; trial < 50; trial++) {
        // Against the definition: at each place the longest of all tokens that match.
        int len = (int)below(200);
        for (int i = 0; i < len; i++) { text[i] = (char)(trial % 2 ? 'm' + below(3) : below(256)); if (text[i] == 'Q') text[i] = 'q'; }
        m = tokenizer_encode(&t, text, (size_t)len, ids, 3000);
        same = same && m >= 0 && decode(&t, ids, m, back) == len && !memcmp(text, back, (size_t)len);
        for (int64_t i = 0, at = 0; same && i < m; at += t.len[ids[i++]]) {
            int best = 0;
            for (int id = 0; id < vocab; id++)
                if (id != eot && t.len[id] <= len - at && !memcmp(t.tok[id], text + at, t.len[id]) && t.len[id] > best) best = t.len[id];
            same = best == t.len[ids[i]];
        }
    }
    check(same, "table: random text equals the definition", "");
    tokenizer_free(&t);

    int bad = 0;
    for (size_t cut = 0; cut < n; cut++) {      // every shorter file is refused, with its path
        char *exact = (char *)malloc(cut + 1);
        must(exact != NULL, "malloc");
        memcpy(exact, b, cut);
        err[0] = 0;
        if (tokenizer_open(&t, put("cut_tok.bin", exact, cut), err, sizeof err) != -1 || t.tok || t.len || !strstr(err, "cut_tok.bin: ")
            || !strstr(err, "expected") || !strstr(err, "found")) bad++;
        free(exact);
    }
    check(!bad, "tokenizer.bin cut at every byte", err);
    char want[64], found[64];
    snprintf(want, sizeof want, "expected %zu bytes for %d tokens", n, vocab);
    snprintf(found, sizeof found, "found %zu", n + 1);
    check_error(tokenizer_open(&t, put("tok.bin", b, n + 1), err, sizeof err), "tokenizer.bin with a byte more", want, found);
    check_error(tokenizer_open(&t, put("tok.bin", b, 1000), err, sizeof err), "tokenizer.bin cut in the header", "1024 bytes",
                "of 1000 bytes");
    snprintf(want, sizeof want, "token %d of %d", vocab - 1, vocab);
    check_error(tokenizer_open(&t, put("tok.bin", b, n - 1), err, sizeof err), "tokenizer.bin cut in the last token", want, "bytes left");
    uint8_t length = b[1024];
    b[1024] = 0;
    check_error(tokenizer_open(&t, put("tok.bin", b, n), err, sizeof err), "tokenizer.bin with an empty token", "token 0 of", "length 0");
    b[1024] = length;
    header(b, 20240328, 3, (uint32_t)vocab, (uint32_t)eot, 0);
    check_error(tokenizer_open(&t, put("tok.bin", b, n), err, sizeof err), "tokenizer.bin wrong version", "version 1 or 2", "found 3");
    header(b, 20240520, 2, (uint32_t)vocab, (uint32_t)eot, 0);
    check_error(tokenizer_open(&t, put("tok.bin", b, n), err, sizeof err), "tokenizer.bin wrong magic", "20240328", "found 20240520");
    header(b, 20240328, 2, 0xffffffffu, 0, 0);
    check_error(tokenizer_open(&t, put("tok.bin", b, n), err, sizeof err), "tokenizer.bin huge vocabulary", "1 to", "found 4294967295");
    header(b, 20240328, 2, 0, 0, 0);
    check_error(tokenizer_open(&t, put("tok.bin", b, n), err, sizeof err), "tokenizer.bin no vocabulary", "1 to", "found 0");
    header(b, 20240328, 2, (uint32_t)vocab, (uint32_t)vocab, 0);
    snprintf(want, sizeof want, "vocabulary size %d", vocab);
    snprintf(found, sizeof found, "found %d", vocab);
    check_error(tokenizer_open(&t, put("tok.bin", b, n), err, sizeof err), "tokenizer.bin eot not below vocabulary", want, found);
    header(b, 20240328, 1, (uint32_t)vocab, 0, 0);
    check_error(tokenizer_open(&t, put("tok.bin", b, n), err, sizeof err), "tokenizer.bin version 1 too small for its eot",
                want, "found 50256");
    check_error(tokenizer_open(&t, in_dir("nowhere"), err, sizeof err), "tokenizer.bin missing", "nowhere", "No such file");
    check_error(tokenizer_open(&t, in_dir("text"), err, sizeof err), "tokenizer.bin a folder", "/text", "regular file");

    // Version 1 has GPT-2's size and eot; here its tokens are the three letters of their number.
    header(b, 20240328, 1, 50257, 7, 0);
    n = 1024;
    for (int i = 0; i < 50257; i++) { b[n++] = 3; for (int j = 0; j < 3; j++) b[n++] = (uint8_t)('A' + (i >> 6 * j & 63)); }
    ok = !tokenizer_open(&t, put("tok.bin", b, n), err, sizeof err);
    check(ok && t.vocab == 50257 && t.eot == 50256 && tokenizer_decode(&t, 50255, &s) == 3 && s[0] == 'A' + (50255 & 63)
          && tokenizer_encode(&t, s, 3, ids, 1) == 1 && ids[0] == 50255, "tokenizer.bin version 1", err);
    tokenizer_free(&t);
}

int main(int argc, char **argv) {
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64_t)time(NULL) * 1000003u + (uint64_t)getpid();
    printf("seed %" PRIu64 "\n", seed);
    rng = seed * 0x9E3779B97F4A7C15ULL + 1;
    if (!rng) rng = 1;
    must(mkdtemp(dir) != NULL, dir);
    int fds = open_fds();
    test_text();
    test_shards();
    test_bad_bins();
    test_austen();
    test_tokenizer();
    test_utf8();
    check(open_fds() == fds, "no file descriptor left open", "");
    remove_tree(dir);
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
