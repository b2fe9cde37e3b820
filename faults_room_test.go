//go:build linux

package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// otherPools matches the service's connections that are not of the lease pool, by the last
// statement. Of that pool some may have run no statement yet; they are left alone.
const otherPools = `application_name = 'nexusflow' AND query <> '' AND query !~ ` +
	`'name: (Beat|Complete|Fail|Release|CancelRequests|AttemptOutcomes|Expire)'`

// PostgreSQL has no connection left for requests: they are refused, and what runs goes on over
// the connections that leases have to themselves.
func TestFaultServerFull(t *testing.T) {
	longFault(t)
	b := newBed(t, ownPostgres, with("LOG_LEVEL", "info"))
	b.pg.restart(t, "max_connections=30", "superuser_reserved_connections=0")
	b.db.Reset()
	a := b.started("A")[0]
	b.probe.set(holding)
	held := a.submitMany(3, probeTask)
	b.within(20*time.Second, "3 held", func() bool { return len(b.probe.running()) == 3 })
	runs := b.probe.running()

	release := b.fillServer()
	queued := b.insert(20, "{}")
	lines := len(a.log.allLines()) - a.log.count(`"request"`)
	b.within(20*time.Second, "not ready", func() bool {
		code, body := a.get("/readyz")
		return code == http.StatusServiceUnavailable && strings.Contains(body, `"postgres":"down"`)
	})
	a.mustRefuse(probeTask)
	runs[0].end(completing(runs[0]))
	b.soon(2*time.Second, "a result is stored meanwhile", b.allAre([]uuid.UUID{runs[0].task}, statusCompleted))
	b.during(3*faultLease, "the others keep their leases, nothing else begins, and POST is refused", func() bool {
		<-time.After(200 * time.Millisecond)
		if b.probe.count() != 3 || len(b.probe.running()) != 2 {
			return false
		}
		s := a.post(probeTask)
		return s.code == http.StatusServiceUnavailable && s.took < 10*time.Second
	})
	if n := b.number("SELECT count(*) FROM tasks WHERE status = 'processing' AND attempt = 1 AND lease_until > clock_timestamp()"); n != 2 {
		t.Errorf("%d tasks hold their lease, want 2", n)
	}
	if n := len(a.log.allLines()) - a.log.count(`"request"`) - lines; n > 15 {
		t.Errorf("%d log lines beside those of the requests, want a few", n)
	}

	b.probe.release()
	release()
	b.soon(5*time.Second, "POST is accepted again", func() bool { return a.post(probeTask).code == http.StatusAccepted })
	b.within(60*time.Second, "all completed", b.allAre(append(queued, held...), statusCompleted), b.openTasks)
	b.check()
	for _, id := range held {
		if row, n := b.row(id), len(b.probe.of(id)); row.Attempt != 1 || row.Lost != 0 || n != 1 {
			t.Errorf("a held task ran %d times and became %+v, want one run and attempt 1", n, row)
		}
	}
}

// fillServer takes every connection that PostgreSQL has, but for the lease pool's and one of
// the test's, until the returned function is called.
func (b *bed) fillServer() (release func()) {
	b.t.Helper()
	config, err := pgx.ParseConfig(b.pg.dsn(b.name))
	if err != nil {
		b.t.Fatal(err)
	}
	config.RuntimeParams["application_name"] = "filler"
	var began time.Time // on PostgreSQL's clock; the query also gives the test's pool a connection to keep
	b.query(&began, "SELECT clock_timestamp()")
	var taken []*pgx.Conn
	release = func() {
		for _, conn := range taken {
			conn.Close(context.WithoutCancel(b.t.Context()))
		}
		taken = nil
	}
	b.t.Cleanup(release)
	b.within(30*time.Second, "PostgreSQL full", func() bool {
		for {
			conn, err := pgx.ConnectConfig(b.t.Context(), config)
			if err != nil {
				if state := sqlState(err); state != "53300" {
					b.t.Fatalf("fill PostgreSQL: %v", err)
				}
				break
			}
			taken = append(taken, conn)
		}
		// What the service loses here is taken in the next round, if it is not faster. One of its
		// connections that is younger than this is of another pool too, whatever it has run.
		return b.number("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE "+otherPools+
			" OR application_name = 'nexusflow' AND backend_start > $1", began) == 0
	})
	b.t.Logf("%d connections taken", len(taken))
	return release
}

// mustRefuse posts a task that must be refused for now, in time and with word of when to come again.
func (m *instance) mustRefuse(body string) {
	m.bed.t.Helper()
	begin := time.Now()
	resp, err := m.bed.http.Post("http://"+m.address()+"/tasks", "application/json", strings.NewReader(body))
	if err != nil {
		m.bed.t.Fatal(err)
	}
	resp.Body.Close()
	took := time.Since(begin)
	m.bed.t.Logf("POST was refused after %v; promised 10s", took.Round(time.Millisecond))
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" || took > 10*time.Second {
		m.bed.t.Errorf("POST = %d, Retry-After %q after %v, want 503 within 10s", resp.StatusCode, resp.Header.Get("Retry-After"), took)
	}
}

// The disk that holds the tasks is full: they can be read and not written. What workers have
// finished is stored once there is room.
func TestFaultDiskFull(t *testing.T) {
	longFault(t)
	b := newBed(t, ownPostgres, with("LOG_LEVEL", "info"))
	disk := b.smallDisk(8 << 20)
	a := b.started("A")[0]
	known := a.submit(probeTask)
	b.within(20*time.Second, "completed", b.allAre([]uuid.UUID{known}, statusCompleted))
	b.probe.set(holding)
	held := a.submitMany(4, probeTask)
	b.within(20*time.Second, "4 held", func() bool { return len(b.probe.running()) == 4 })
	queued := a.submitMany(20, probeTask)

	makeRoom := fillDisk(t, disk)
	queued = append(queued, b.insertUntilFull()...)
	// Values of this size need new pages, of which there are none.
	random := make([]byte, 8<<10)
	rand.Read(random)
	large := hex.EncodeToString(random)
	task := fmt.Sprintf(`{"name":"probe","payload":{"filler":%q}}`, large)
	a.mustRefuse(task)
	for _, r := range b.probe.running() {
		r.end(reply{http.StatusOK, fmt.Sprintf(`{"attempt":%d,"by":%q,"filler":%q}`, r.attempt, r.member, large)})
	}
	lines := len(a.log.allLines()) - a.log.count(`"request"`)
	b.during(3*faultLease, "GET works, POST does not, no result is stored and the process is up", func() bool {
		<-time.After(200 * time.Millisecond)
		s := a.post(task)
		code, body := a.get("/tasks/" + known.String())
		if s.code != http.StatusServiceUnavailable || code != http.StatusOK || !strings.Contains(body, statusCompleted) {
			t.Logf("POST %d %s, GET %d %s", s.code, s.body, code, body)
			return false
		}
		return b.countOf(held, statusCompleted) == 0 && a.alive()
	})
	if n := len(a.log.allLines()) - a.log.count(`"request"`) - lines; n > 40 {
		t.Errorf("%d log lines beside those of the requests, want a few", n)
	}

	makeRoom()
	b.soon(faultLease+2*time.Second, "the results are stored", b.allAre(held, statusCompleted), b.openTasks)
	b.probe.release()
	b.within(60*time.Second, "all completed", b.allAre(queued, statusCompleted), b.openTasks)
	b.check()
	for _, id := range held {
		if row, n := b.row(id), len(b.probe.of(id)); row.Attempt != 1 || row.Lost != 0 || n != 1 {
			t.Errorf("a held task ran %d times and became attempt %d, lost %d, want one run", n, row.Attempt, row.Lost)
		}
	}
	if n := b.number("SELECT count(*) FROM tasks WHERE retry_count > 0"); n != 0 {
		t.Errorf("%d tasks paid for the full disk with a retry", n)
	}
}

// smallDisk moves the tasks to a file system of their own of so many bytes and returns its path.
// The journal stays where it is: PostgreSQL does not outlive a full one.
func (b *bed) smallDisk(size int) string {
	b.t.Helper()
	dir := filepath.Join(b.pg.dir, "small")
	if err := os.Mkdir(dir, 0o700); err != nil {
		b.t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d,mode=0700", size)); err != nil {
		b.t.Skipf("SKIPPED, NOT TESTED: mount a small file system: %v", err)
	}
	b.t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			b.t.Errorf("unmount %s: %v", dir, err)
		}
	})
	owner, err := os.Stat(filepath.Join(b.pg.dir, "data"))
	if err != nil {
		b.t.Fatal(err)
	}
	st := owner.Sys().(*syscall.Stat_t)
	if err := os.Chown(dir, int(st.Uid), int(st.Gid)); err != nil {
		b.t.Fatal(err)
	}
	b.exec("CREATE TABLESPACE small LOCATION '" + dir + "'")
	b.exec("ALTER TABLE tasks SET TABLESPACE small")
	b.exec("ALTER INDEX ALL IN TABLESPACE pg_default SET TABLESPACE small")
	return dir
}

// fillDisk takes all the room of a small file system until the returned function is called.
func fillDisk(t *testing.T, dir string) (makeRoom func()) {
	t.Helper()
	name := filepath.Join(dir, "filler")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for err == nil {
		_, err = f.Write(make([]byte, 4<<10))
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	return func() {
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
	}
}

// insertUntilFull submits tasks by SQL until the disk has no room for one more.
func (b *bed) insertUntilFull() []uuid.UUID {
	b.t.Helper()
	var ids []uuid.UUID
	for {
		var id uuid.UUID
		err := b.db.QueryRow(b.t.Context(), "INSERT INTO tasks (name, payload) VALUES ('probe', '{}') RETURNING task_id").Scan(&id)
		if sqlState(err) == "53100" {
			b.t.Logf("the disk is full after %d more tasks", len(ids))
			return ids
		}
		if err != nil {
			b.t.Fatal(err)
		}
		ids = append(ids, id)
	}
}
